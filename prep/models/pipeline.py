"""A diffusers pipeline, a directory or a single file: its components' files, family and prediction type."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.formatting import join_texts
from prep.models.checkpoints.contents import (
    NAMED_AS,
    PUBLISHED,
    Config,
    Contents,
    contents_of,
    encoder_part,
    name_configs,
    no_denoiser,
)
from prep.models.components import class_of, numbered
from prep.models.configs import Configs, is_modular, pipeline_index
from prep.models.families.registry import FAMILIES, families_of_pipeline
from prep.models.family import Family, Prediction
from prep.models.files import (
    CONFIG_BYTES,
    INDEX,
    KOLORS,
    TOKENIZER_BYTES,
    VOCABULARY,
    ComponentFiles,
    Model,
    Shape,
    SingleFile,
    StoredTensor,
    distilled,
    elsewhere,
    parse_config,
    read_config,
    read_small,
    refuse_adapter,
    refuse_redirection,
)
from prep.models.weights import (
    check_numbers,
    has_weights,
    index_name,
    read_tensors,
    scales_in,
    shapes_in,
    variant_of,
    weight_files,
)
from prep.parse import brief

# The files of a transformers tokenizer: vocabularies, merges, and the configs that change its output.
_TOKENIZER_FILES = ("added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt",
                    "special_tokens_map.json", "spiece.model", "tokenizer.json",
                    "tokenizer_config.json", "vocab.json")
# The component of a pipeline whose text encoder sees pictures, with a tokenizer inside: that which reads texts, unless
# the processor prepares pictures alone.
PROCESSOR, PICTURES_ALONE = "processor", "text_processor"
PROCESSORS = (PROCESSOR, PICTURES_ALONE)
# Components with a tokenizer of which no text encoder has the number. Anima has T5's without T5.
APART = (*PROCESSORS, "t5_tokenizer")
_PREPARATION = "preprocessor_config.json"  # of pictures
# Names of files, those that are a vocabulary, and these for people.
_USUAL_FILES = (_TOKENIZER_FILES, ({"tokenizer.json"}, {"vocab.json", "merges.txt"}, {"spiece.model"}),
                "tokenizer.json, vocab.json with merges.txt, or spiece.model")
# ChatGLM's tokenizer reads no other vocabulary; other models have a tokenizer.model beside what is read of them.
_OWN_FILES = (("added_tokens.json", "special_tokens_map.json", VOCABULARY, "tokenizer_config.json"), ({VOCABULARY},),
              VOCABULARY)
_SAVE_TOKENIZER = "download the model again, or save its tokenizer with transformers: tokenizer.save_pretrained(DIR)"


def prediction_of(model: Model, family: Family) -> Prediction:
    """What the denoiser predicts: from the scheduler's config if the family has several kinds. Raises `ModelError`."""
    if len(family.predictions) == 1:
        return family.predictions[0]
    kind = scheduler_config(model).get("prediction_type", family.predictions[0])
    for known in family.predictions:
        if kind == known:
            return known
    raise ModelError(f"{model} predicts {brief(kind)}, expected {' or '.join(family.predictions)}")


def scheduler_config(model: Model) -> dict[str, Any]:
    """The scheduler's config of `model`; with the package's configs, as a single file says. Raises `ModelError`."""
    found = schedule_in_code(model)
    if found is not None:
        return dict(found)
    found = read_config(model / SCHEDULER)
    if isinstance(model, SingleFile) and model.config.parent == PUBLISHED:
        return {**found, **contents_of(model.path).scheduler}
    return found


def schedule_in_code(model: Model) -> Mapping[str, Any] | None:
    """The scheduler's config that the code of a modular pipeline has; `None`: the model has one of its own."""
    index = pipeline_index(model)
    families = families_of_pipeline(index.get("_class_name")).values() if "scheduler" not in index else ()
    return next((family.schedule for family in families if family.schedule is not None), None)


SCHEDULER = "scheduler/scheduler_config.json"
# In the names of pipelines that are given a picture to start from, or to change: their denoisers have other inputs, or
# were trained to copy.
_OF_PICTURES = ("Edit", "Kontext", "Inpaint", "Fill", "Img2Img", "Pix2Pix", "Control", "Redux", "Upscale", "Outpaint")


def infer_family(model: Model, named: str = "") -> str:
    """The family of the pipeline directory `model`, from its class name, and from its configs where several families
    have that class. Of a class that is not known: `named`, if the model is like those. Raises `ModelError`.
    """
    index, configs = pipeline_index(model), Configs(model)
    name = index.get("_class_name")
    families = families_of_pipeline(name)
    if not families and any(word in str(name) for word in _OF_PICTURES):
        raise ModelError(f"{model} is a {brief(name)}, which makes pictures from other pictures: such models are not "
                         "supported", hint="name the model that makes pictures from text alone; prep models lists the "
                         "known families")
    if any(name in family.distilled for family in FAMILIES.values()):
        raise distilled(model)
    known = families or {one: FAMILIES[one] for one in (named,) if one and _has_components(index, FAMILIES[one])}
    for family in known.values():
        _require_mask_input(model, family, configs)
        if family.fits is None or family.fits(configs):
            return family.name
    spelled = name if isinstance(name, str) and len(name) < 80 else brief(name)
    why = f"but its configs are of no known family: {' and '.join(families)} have other inputs" if families else (
        "which belongs to no known family")
    if named and not families:
        why += f", and its components are not those of '{named}'"
    if is_modular(model):
        raise ModelError(f"{model} is a {spelled}, {why}", hint="prep models lists the known families; name a "
                         f"repository of the model with {INDEX}: most have one")
    raise ModelError(f"{model} is a {spelled}, {why}", hint="prep models lists the known families; "
                     + ("a model with other inputs cannot be trained" if families or named else
                        "set family in [model] of a recipe if it is one of them"))


def _require_mask_input(model: Model, family: Family, configs: Configs) -> None:
    """Raises `ModelError` for a denoiser that takes no mask, in a pipeline of a family that inpaints: diffusers lets it
    inpaint without having learned to."""
    if family.inpainting is None or not os.path.lexists(model / family.denoiser / "config.json"):
        return
    width = configs(family.denoiser).get("in_channels")
    plain = next(wide for name, (_, wide) in family.config_widths.items() if name == "in_channels")
    if width == plain * family.latent_channels:
        raise ModelError(f"{model} is a {family.pipelines[0]}, but its {family.denoiser} takes {width} channels, which "
                         "leave no room for a mask: it makes pictures from text alone",
                         hint=f"set _class_name in its {INDEX} to the pipeline of such models "
                         f"({family.sampling.pipeline}), to train it as one; to inpaint, name a model with in_channels "
                         f"{plain * family.input_channels}")


def _has_components(index: Mapping[str, Any], family: Family) -> bool:
    """Whether a pipeline has the components of a family, and of its classes."""
    def is_one(name: str, kinds: tuple[tuple[str, str], ...]) -> bool:
        there = index.get(name)
        return name in family.optional if there in (None, [None, None]) else isinstance(there, list) and (
            tuple(there) in kinds)

    return all(is_one(name, kinds) for name, kinds in family.components.items())


def family_of(model: Model, named: str) -> str:
    """The family of the pipeline directory `model`, which a recipe may have `named`. Raises `ModelError`, also for the
    name of another family than training would find."""
    found = infer_family(model, named)
    if named not in ("", found):
        raise ModelError(f"{model} is of family '{found}', but family in [model] of the recipe is '{named}'",
                         hint="leave family out of [model]: it is read from the model")
    return found


def weighted_files(model: Model, name: str) -> ComponentFiles:
    """The files of the component `name`, which has weights: of a single file if that has it, else of the directory.

    Raises `ModelError` if files are missing, damaged, inconsistent, or lead to other files.
    """
    kind = class_of(pipeline_index(model), name, model)
    stem, folder = ("diffusion_pytorch_model" if kind[0] == "diffusers" else "model"), model / name
    small = {"config.json": read_small(folder / "config.json", CONFIG_BYTES)}
    config = parse_config(small["config.json"], folder / "config.json")
    refuse_redirection(config, folder / "config.json", kind)
    if config.get("flow_map"):
        raise distilled(model)
    part = part_of(model, name) if isinstance(model, SingleFile) else {}
    tensors: Mapping[str, StoredTensor]
    if isinstance(model, SingleFile) and part:
        whole = contents_of(model.path).tensors
        tensors = {name: whole[there] for name, there in part.items()}
        files = ComponentFiles(folder=folder, config=config, small=small, weights=(model.path,), kind=kind, part=part,
                               tensors=tensors)
    else:
        refuse_adapter(folder)
        weights, index, usual_name = _weights(folder, stem)
        tensors = read_tensors(weights)
        files = ComponentFiles(folder=folder, config=config, small=small | index, weights=weights, kind=kind,
                               usual_name=usual_name, tensors=tensors)
    check_numbers(config, folder / "config.json", tensors)
    if kind[0] == "diffusers" and not part and config.get("quantization_config") and not scales_in(tensors).of:
        raise ModelError(f"the weights in {folder} are quantized: {brief(config['quantization_config'])}",
                         hint="name the model that they were made of; train.toml has quantization for its denoiser")
    return files


def shapes_of(files: ComponentFiles) -> dict[str, Shape]:
    """The shape of each weight of a component of diffusers, by its names. Raises `ModelError`.

    Of a directory they are in the headers of its files; of a single file, what diffusers' converter makes has them.
    """
    if not files.part:
        return shapes_in(files.tensors)
    from prep.models.checkpoints.converted import empty_model, weights_of

    return shapes_in(weights_of(files, empty_model(files)).tensors)


def part_of(model: SingleFile, name: str) -> Mapping[str, str]:
    """The tensors of the component `name` in a single file, by their names in a part; empty: the directory has it.

    Raises `ModelError` if neither has it.
    """
    contents, index = contents_of(model.path), pipeline_index(model)
    if name == "vae":
        part = contents.parts.vae
    elif name.startswith("text_encoder"):
        part = encoder_part(contents, name, _encoders(model, index))
    else:
        part = contents.parts.conditioner if name in _CONDITIONERS else contents.parts.denoiser
    if not part and not has_weights(model / name):
        lacking = "" if model.config.parent == PUBLISHED else f", and neither has {model / name}"
        raise ModelError(f"{model} has no {name.replace('_', ' ')}{lacking}", hint=name_configs(model.path))
    return part


_CONDITIONERS = {family.conditioner.component for family in FAMILIES.values() if family.conditioner is not None}


def _encoders(model: SingleFile, index: Mapping[str, Any]) -> dict[str, Config]:
    """Class and config of each text encoder."""
    return {name: (class_of(index, name, model)[1], read_config(model / name / "config.json"))
            for name in numbered(index, "text_encoder")}


def open_single(path: Path, config: Path) -> SingleFile:
    """The model in the file `path`, with the configs in the directory `config`. Raises `ModelError` if the file has no
    denoiser, or one of another family, or tensors that nothing reads, or says otherwise than the scheduler's config.
    """
    contents, model = contents_of(path), SingleFile(path=path, config=config)
    if not contents.parts.denoiser:
        raise no_denoiser(contents)
    family = infer_family(model)
    if contents.family not in ("", NAMED_AS.get(family, family)):
        raise ModelError(f"{path} is of family '{contents.family}', but {config} is of family '{family}'",
                         hint=name_configs(path))
    _check_scheduler(contents, model)
    encoders = [] if not contents.parts.encoders else [
        encoder_part(contents, name, _encoders(model, pipeline_index(model)))
        for name in numbered(pipeline_index(model), "text_encoder")]
    if surplus := contents.unread() + [next(iter(sorted(part.values()))) for part in contents.parts.encoders.values()
                                       if part not in encoders]:
        raise ModelError(f"{path} has tensors that nothing reads: {join_texts(surplus, 3)}", hint=name_configs(path))
    return model


def _check_scheduler(contents: Contents, model: SingleFile) -> None:
    """Raises `ModelError` if the file says that its denoiser predicts otherwise than its scheduler's config says."""
    config = scheduler_config(model)
    for key, value in contents.scheduler.items():
        if config.get(key) != value:
            raise ModelError(f"{model} says of itself that {key} is {json.dumps(value)}, but the scheduler's config in "
                             f"{model / 'scheduler'} has {brief(config.get(key))}",
                             hint=f"set {key} in a copy of that directory, and name the copy: {model}@COPY")


def _weights(folder: Path, stem: str) -> tuple[tuple[Path, ...], dict[str, bytes], str]:
    """The files of the weights in `folder`, their index if there are several, and the usual name if there is one.

    Raises `ModelError`.
    """
    variant = variant_of(folder, stem)
    weights = weight_files(folder, stem, variant)
    if weights == (folder / f"{stem}{variant and f'.{variant}'}.safetensors",):
        return weights, {}, f"{stem}.safetensors"
    return weights, {index_name(stem): read_small(folder / index_name(stem, variant), CONFIG_BYTES)}, ""


def tokenizer_files(model: Model, name: str) -> ComponentFiles:
    """The files of the tokenizer `name` of the pipeline directory `model`. Raises `ModelError`.

    Without a config a tokenizer has no length, without a vocabulary no ids: transformers loads it all the same, and the
    fault shows late or never.
    """
    kind, folder = class_of(pipeline_index(model), name, model), model / name
    if folder.parent.parent == PUBLISHED:
        return _published_tokenizer(folder)
    known, vocabularies, expected = _OWN_FILES if kind[0] == KOLORS else _USUAL_FILES
    names = [one for one in known if os.path.lexists(folder / one)]
    if "tokenizer_config.json" not in names:
        raise ModelError(f"{folder} has no tokenizer_config.json", hint=elsewhere(folder) or _SAVE_TOKENIZER)
    if not any(vocabulary <= set(names) for vocabulary in vocabularies):
        raise ModelError(f"{folder} has no vocabulary, expected {expected}", hint=_SAVE_TOKENIZER)
    if name in PROCESSORS:
        if not os.path.lexists(folder / _PREPARATION):
            raise ModelError(f"{folder} has no {_PREPARATION}", hint="download the model again")
        names.append(_PREPARATION)
    small = {one: read_small(folder / one, TOKENIZER_BYTES) for one in names}
    config = parse_config(small["tokenizer_config.json"], folder / "tokenizer_config.json")
    refuse_redirection(config, folder / "tokenizer_config.json", kind)
    return ComponentFiles(folder=folder, config=config, small=small, weights=(), kind=kind)


def _published_tokenizer(folder: Path) -> ComponentFiles:
    """A tokenizer of the package's configs: CLIP's merges, and the vocabulary that follows from them."""
    small = {one: read_small(folder / one, CONFIG_BYTES) for one in ("special_tokens_map.json",
                                                                     "tokenizer_config.json")}
    merges = read_small(PUBLISHED / "merges.txt", CONFIG_BYTES)
    vocabulary = json.dumps(clip_vocabulary(merges.decode()), ensure_ascii=False)
    small |= {"merges.txt": merges, "vocab.json": vocabulary.encode()}
    return ComponentFiles(folder=folder, config=parse_config(small["tokenizer_config.json"], folder), weights=(),
                          small=dict(sorted(small.items())))


def clip_vocabulary(merges: str) -> dict[str, int]:
    """The id of each token of CLIP: bytes as letters, the same at the end of a word, what merges make, start and end.

    As `SimpleTokenizer` of openai/CLIP (clip/simple_tokenizer.py) counts them.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = [chr(code) for code in plain]
    letters += [chr(256 + number) for number in range(256 - len(plain))]
    made = ["".join(line.split()) for line in merges.split("\n") if line and not line.startswith("#version")]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *made, "<|startoftext|>", "<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}


def single_model_files(folder: Path) -> ComponentFiles:
    """The files of a transformers model that lies alone in `folder`, as on the Hub. Raises `ModelError`."""
    if not os.path.lexists(folder / "config.json"):
        raise ModelError(f"{folder} has no config.json",
                         hint="name the directory of one model of transformers, not that of a pipeline")
    refuse_adapter(folder)
    weights, index, usual_name = _weights(folder, "model")
    tensors = read_tensors(weights)
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".txt", ".model"))
    small = {name: read_small(folder / name, TOKENIZER_BYTES) for name in names if ".index." not in name}
    configs = {name: parse_config(data, folder / name) for name, data in small.items() if name.endswith("config.json")}
    check_numbers(configs["config.json"], folder / "config.json", tensors)
    return ComponentFiles(folder=folder, config=configs["config.json"], small=small | index, weights=weights,
                          usual_name=usual_name, tensors=tensors)


def single_tokenizer_files(files: ComponentFiles) -> ComponentFiles | None:
    """The files of the tokenizer beside a model that lies alone; `None` if it has none. Raises `ModelError`."""
    known, vocabularies, _ = _USUAL_FILES
    small = {name: files.small[name] for name in known if name in files.small}
    if "tokenizer_config.json" not in small or not any(vocabulary <= set(small) for vocabulary in vocabularies):
        return None
    config = parse_config(small["tokenizer_config.json"], files.folder / "tokenizer_config.json")
    return ComponentFiles(folder=files.folder, config=config, small=small, weights=())
