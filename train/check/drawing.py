"""The model that `sample.model` names, before it is loaded: whether it can draw pictures with the adapters of a run."""

from __future__ import annotations

from prep.errors import ModelError
from prep.loader.index import Index
from prep.manifest.document import Manifest
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.files import Model
from prep.models.hub import locate
from prep.models.pipeline import prediction_of as predicted_by
from prep.training.schema import Config
from train.check.objective import check_noise, check_sampler, prediction_of
from train.check.rows import check_rows
from train.models.targets import Shapes, layers_of, read_weights, targeted
from train.setup import RunRequest

_ANOTHER = "name another model of the family with sample.model, or none: --set sample.model="


def drawing_model(request: RunRequest, config: Config, manifest: Manifest, index: Index | None, adapted: Shapes
                  ) -> Model | None:
    """The model that draws sample pictures of a LoRA on the layers `adapted`; `None`: the trained one does. Its VAE and
    text encoders are not looked at: they are not used. Raises `ModelError`, `ConfigError`."""
    if not config.sample.model or config.method == "full":  # which is refused
        return None
    try:
        model = locate(config.sample.model, download=request.download)
    except ModelError as error:
        raise ModelError(f"sample.model: {error.message}",
                         hint=f"{error.hint}; train sample takes --model in place of it") from None
    family, trained = FAMILIES[manifest.family], prediction_of(config, manifest)
    check_rows(model, manifest, index, _ANOTHER)
    if (predicted := predicted_by(model, family)) != trained:
        raise ModelError(f"model {model} predicts {predicted}, but the model that this run trains predicts {trained}",
                         hint=_ANOTHER)
    check_noise(model, config, manifest)
    check_sampler(model, config, manifest)
    _check_layers(model, family, config, adapted)
    return model


def _check_layers(model: Model, family: Family, config: Config, adapted: Shapes) -> None:
    """Raises `ModelError` unless the settings choose the layers `adapted` of the model, too, with the same shapes."""
    layers = layers_of(read_weights(model, family))
    for name, shape in adapted.items():
        if name not in layers:
            raise ModelError(f"the denoiser of {model} has no layer '{name}', which this run adapts", hint=_ANOTHER)
        if layers[name] != shape:
            raise ModelError(f"'{name}' of {model} has the shape {list(layers[name])}, expected {list(shape)}, as in "
                             "the model that this run trains", hint=_ANOTHER)
    for name in targeted(layers, config.lora, family.lora.presets):
        if name not in adapted:
            raise ModelError(f"the denoiser of {model} has a layer '{name}' to adapt, which the model that this run "
                             "trains lacks", hint=_ANOTHER)
