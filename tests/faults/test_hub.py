"""Models that would have to come from the Hub."""

import pytest


@pytest.mark.fault(43, "an error names the model that is not in the cache; what is local works")
def test_uncached_model_offline_error_names_model(make, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^model_name_or_path: the model 'nobody/nothing' cannot"):
        make(model="nobody/nothing")
    trainer = make(max_steps=1)
    trainer.train()
    assert trainer.state.step == 1
