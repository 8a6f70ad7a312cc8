"""examples/early_stopping.py."""

from types import SimpleNamespace

from examples.early_stopping import EarlyStopping


def test_run_stops_after_evaluations_without_higher_reward() -> None:
    stopped: list[int] = []
    callback = EarlyStopping(patience=2, least=0.05)
    for step, reward in enumerate([0.1, 0.3, 0.32, 0.5, 0.4, 0.54, 0.2]):
        trainer = SimpleNamespace(stop=lambda step=step: stopped.append(step))
        callback.on_evaluate(trainer, {"eval_reward": reward})
    assert stopped == [5, 6]  # 0.32 and 0.54 are not 0.05 above the highest
