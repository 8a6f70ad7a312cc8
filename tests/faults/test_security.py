"""Nobody is let in: what a file, a dataset or a model says is data, and is never run."""

import ast
import json
import shutil
from pathlib import Path

import pytest

import rlhf_pg
from rlhf_pg import GRPOConfig
from rlhf_pg.config.parse import parse

# What runs or unpickles what it is given, or may.
CALLS = {"eval", "exec", "compile", "__import__", "import_module", "system", "popen"}
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "code", "runpy"}
HARMLESS = {"torch.compile", "re.compile", "regex.compile", "package.compile"}
# The one place that imports what a recipe names: a Python file or a dotted name, never a URL.
NAMED_CODE = {
    "boundary/user_modules.py": ["importlib.import_module"],
    # A command or a class, by a name out of a fixed list.
    "cli/main.py": ["importlib.import_module"],
    "data/inputs.py": ["import_module"],
    "rewards/__init__.py": ["import_module"],
    "episodes/adapters/__init__.py": ["import_module"],
    "episodes/factory.py": ["import_module"],
    "rollout/native/workers.py": ["pickle"],  # the trainer's own engine, for its workers
    "boundary/pool.py": ["pickle"],  # between the trainer and workers that run the user's own code
}
UNSAFE = (
    "eval(x)",
    "from pickle import loads",
    "torch.load(path)",
    "subprocess.run(x, shell=True)",
    "AutoModel.from_pretrained(x, trust_remote_code=True)",
)
OPTIONS = {"shell", "trust_remote_code", "allow_pickle"}


def misuses(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            found += [name for name in modules if name.split(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        # `module.eval()` takes nothing that it could run.
        last = name if name.endswith(".eval") else name.rsplit(".", 1)[-1]
        if name == "torch.load" or (last in CALLS and name not in HARMLESS):
            found.append(name)
        # A variable hands on what the config says, which is False by default.
        chosen = [key.arg for key in node.keywords if ast.unparse(key.value) == "True"]
        found += [option for option in chosen if option in OPTIONS]
    return found


def test_package_has_no_unsafe_calls() -> None:
    package = Path(rlhf_pg.__file__).parent
    found = {
        path.relative_to(package).as_posix(): misuses(ast.parse(path.read_text()))
        for path in package.rglob("*.py")
    }
    assert {name: said for name, said in found.items() if said} == NAMED_CODE
    assert all(misuses(ast.parse(line)) for line in UNSAFE)


def test_yaml_object_tag_in_recipe_is_refused(tmp_path, capsys) -> None:
    recipe, planted = tmp_path / "recipe.yaml", tmp_path / "planted"
    recipe.write_text(f"run_name: !!python/object/apply:os.mkdir ['{planted}']\n")
    with pytest.raises(SystemExit):
        parse(GRPOConfig, ["--config", str(recipe)])
    assert "not valid YAML" in capsys.readouterr().err
    assert not planted.exists()


def test_remote_code_runs_only_with_trust_remote_code(
    make, model_path, tmp_path, monkeypatch, capsys
) -> None:
    model, fired = tmp_path / "model", tmp_path / "fired"
    shutil.copytree(model_path, model)
    (model / "planted.py").write_text(f"print('fired')\nopen({str(fired)!r}, 'w')\n")
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "planted.A"}, "model_type": "planted"}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        make(model=str(model))
    assert not fired.exists()
    with pytest.raises(ValueError, match=r"AttributeError: .* has no attribute 'A'"):
        make(model=str(model), trust_remote_code=True)
    assert fired.exists()
    assert f"runs the code of {model}" in capsys.readouterr().out.split("fired")[0]
