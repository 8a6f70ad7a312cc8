"""The final model of a run as `from_pretrained` reads it, and its upload to the Hub."""

import logging
from collections.abc import Callable
from pathlib import Path

import huggingface_hub

from rlhf_pg.boundary.output_files import write_file
from rlhf_pg.boundary.quoted import quote, tell
from rlhf_pg.checkpoint import atomic
from rlhf_pg.checkpoint.checkpointer import Checkpointer
from rlhf_pg.config.run import TrainingConfig
from rlhf_pg.runtime import Runtime

logger = logging.getLogger(__name__)


def save_final(
    checkpointer: Checkpointer,
    runtime: Runtime,
    path: Path,
    write_model: Callable[[atomic.Save, Path], None],
) -> None:
    """Save the output of `write_model` and a model card, all or nothing: if it fails, the old
    directory is kept, and all processes raise OSError.
    """
    saving = atomic.Save(runtime, path)
    partial = atomic.partial_of(path)
    saving.main(lambda: atomic.begin(path))
    write_model(saving, partial)
    if runtime.is_main:
        try:
            from rlhf_pg.report.model_card import model_card

            card = model_card(
                checkpointer.config,
                checkpointer.fingerprints().get("train_dataset"),
                checkpointer.directory.parent,
                is_adapter=(partial / "adapter_config.json").exists(),
            )
            write_file(partial / "README.md", [card.encode()])
        except Exception as error:  # a card is not worth failing a run
            logger.warning("final/ has no model card: %s", tell(error))
    saving.main(lambda: atomic.publish(path, {"step": checkpointer.state.step}))


def check_hub(args: TrainingConfig) -> None:
    """Refuse to train with push_to_hub but without a token (ValueError)."""
    if args.push_to_hub and huggingface_hub.get_token() is None:
        raise ValueError("push_to_hub needs a Hub token: set HF_TOKEN, or run `hf auth login`")


def push(path: Path, args: TrainingConfig) -> str | None:
    """Upload a saved model to the Hub, and return its address; on failure warn and return None."""
    name = args.hub_model_id or Path(args.output_dir).name
    try:
        hub = huggingface_hub.HfApi()
        repository = hub.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
        hub.upload_folder(
            repo_id=repository,
            folder_path=path,
            commit_message="Trained with rlhf_pg",
        )
    except Exception as error:  # from the network, the Hub or httpx
        logger.warning(
            "push_to_hub: %s could not be uploaded (%s): try `hf upload %s %s`",
            quote(str(path)),
            tell(error),
            quote(name),
            quote(str(path)),
        )
        return None
    return f"{hub.endpoint}/{repository}"
