"""Converts when sd-scripts saves checkpoints, draws sample pictures and validates, and its sampler."""

from __future__ import annotations

from collections.abc import Mapping

from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.kohya.family import is_flow
from prep.recipe.convert.training import Training, number_of

# Its samplers, some of them with k_ before the name, and diffusers' schedulers that they are.
_SAMPLERS: Mapping[str, str] = {
    "ddim": "DDIMScheduler", "ddpm": "DDPMScheduler", "pndm": "PNDMScheduler", "lms": "LMSDiscreteScheduler",
    "euler": "EulerDiscreteScheduler", "euler_a": "EulerAncestralDiscreteScheduler", "heun": "HeunDiscreteScheduler",
    "dpm_2": "KDPM2DiscreteScheduler", "dpm_2_a": "KDPM2AncestralDiscreteScheduler",
    **dict.fromkeys(("dpmsolver", "dpmsolver++"), "DPMSolverMultistepScheduler"),
    "dpmsingle": "DPMSolverSinglestepScheduler",
}
# Of these, the trainer takes no others for a noise schedule that ends in pure noise.
_RESCALED = ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler",
             "DPMSolverMultistepScheduler")


def put_times(config: ToolConfig, training: Training) -> None:
    """Converts when checkpoints, sample pictures and validations are made. The number of epochs is always whole."""
    _checkpoints(config, training)
    epochs = number_of(config.any("sample_every_n_epochs"))
    if epochs:
        training.put_epochs("sample.every", epochs, "sample_every_n_epochs")
    else:
        training.put("sample.every", int(number_of(config.any("sample_every_n_steps")) or 0), "sample_every_n_steps")
    if steps := number_of(config.any("validate_every_n_steps")):
        training.put("validation.every", int(steps), "validate_every_n_steps")
    elif epochs := number_of(config.any("validate_every_n_epochs")):
        training.put_epochs("validation.every", epochs, "validate_every_n_epochs")
    _sampler(config, training)


def _checkpoints(config: ToolConfig, training: Training) -> None:
    """Converts when checkpoints are saved, and how many are kept: all (0) unless the file says.

    save_last_n_steps are those of the newest checkpoints, and save_last_n_epochs a number of checkpoints.
    """
    training.put("checkpoint.keep", 0, "save_last_n_steps")
    if steps := number_of(config.any("save_every_n_steps")):
        training.put("checkpoint.every", int(steps), "save_every_n_steps")
        if (last := number_of(config.any("save_last_n_steps"))) and steps >= 1:
            training.put("checkpoint.keep", int(last) // int(steps) + 1, "save_last_n_steps")
        return
    epochs, ratio = (number_of(config.any(name)) or 0 for name in ("save_every_n_epochs", "save_n_epoch_ratio"))
    total = training.settings.get("epochs")
    if ratio > 0 and total is None:
        training.note("save_n_epoch_ratio", ratio, "a part of the run's epochs, of which the file does not say the "
                      "number; checkpoint.every keeps its default, 500 steps")
        return
    if ratio > 0 and total is not None:
        epochs = max(1, total // ratio)
    training.put_epochs("checkpoint.every", epochs, "save_n_epoch_ratio" if ratio > 0 else "save_every_n_epochs")
    count = number_of(config.any("save_last_n_epochs")) if epochs else None
    if count and count >= 1:
        training.put("checkpoint.keep", int(count), "save_last_n_epochs")


def _sampler(config: ToolConfig, training: Training) -> None:
    """Converts the sampler of pictures, which sd-scripts has for models that predict epsilon or v."""
    sampler = config.any("sample_sampler")
    if not sampler:
        return
    name = _SAMPLERS.get(str(sampler).lower().removeprefix("k_"))
    if is_flow(config):
        training.note("sample_sampler", sampler, "sd-scripts ignores it for flows, which it samples with Euler's "
                      "steps; not written")
    elif name is None:
        training.note("sample_sampler", sampler, "no counterpart; the model family's usual one is used")
    elif config.any("zero_terminal_snr") and name not in _RESCALED:
        training.note("sample_sampler", sampler, f"{name} cannot follow a noise schedule that ends in pure noise; "
                      "not written")
    else:
        training.put("sample.sampler", name, "sample_sampler")
        if sampler == "dpmsolver":
            training.note("sample_sampler", sampler, f"{name} is written, which here is dpmsolver++")
