"""Every model family: rows from the cache are what diffusers' own pipeline computes, in every place they are used."""

from __future__ import annotations

import inspect
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beside import scattered, training_adapter
from counted_steps import counted
from family_cases import CASES, Case, named, same
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from pictures import draw
from PIL import Image
from residents import watch_inputs, watch_residents
from runs import go
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from prep.fs.place import Local

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.errors import ModelError
from prep.loader import draws
from prep.loader.batches import batches
from prep.loader.index import open_index
from prep.loader.latents import latents_of
from prep.loader.rows import Rows
from prep.manifest.document import read_manifest
from prep.models.denoiser.samplers import samplers
from prep.models.denoiser.trainable import missing_files
from prep.models.device import hollow
from prep.models.families.registry import FAMILIES
from prep.models.family import Conditions, TextOptions
from prep.models.pipeline import schedule_in_code, scheduler_config
from prep.training.schema import Preserve, Sampling
from train.check import check
from train.config.load import parse
from train.memory.room import room_of
from train.memory.step import count
from train.merging.directory import MergeRequest, merge
from train.models import lora, offload
from train.models.denoiser import load, predict
from train.models.dropout import has_dropout
from train.models.naming import naming_of
from train.objectives.forward import forward, sample_losses
from train.runs.checkpoint_files import save
from train.runs.directory import claim_run, own_manifest, read_run
from train.runs.resume import ResumeComparison, compare, find_start
from train.sampling.prompts import cached
from train.sampling.sampler import _noise, pictures
from train.setup import RunRequest
from train.state import apply_gradients, clip_gradients, create_state, forward_backward
from train.state_files import state_of

CPU = torch.device("cpu")
# Of different lengths, so that the rows of trimmed families differ in length.
CAPTIONS = ["a red cat", "two dogs on a long green bench, " * 3 + "in the rain", "a blue bird",
            "one small house by the sea"]
SIZES = [(64, 64), (70, 64), (96, 32), (64, 64)]  # of two buckets, none scaled


@pytest.fixture(scope="module", ids=named, params=[  # variants of a family, and those few train, are slow tests
    pytest.param(case, marks=pytest.mark.slow) if case.options or case.build in tiny_pipelines.SECONDARY else case
    for case in CASES])
def case(request) -> Case:
    return request.param


@pytest.fixture(scope="module")
def made(case, tmp_path_factory) -> Path:
    """A model, pictures with captions, and their cache, encoded in float32; the path of the manifest."""
    from prep.cli.console import run
    from prep.cli.main import app

    root = tmp_path_factory.mktemp(case.build)
    tiny_pipelines.save(case.build, root / "model", **case.options)
    for number, (caption, size) in enumerate(zip(CAPTIONS, SIZES, strict=True)):
        draw(root / "photos" / f"{number}.png", size, seed=number).with_suffix(".txt").write_text(caption)
        if case.painted is not None:
            soft_mask(root / "photos" / f"{number}-masklabel.png", size, seed=number)
    shown = " --ref photos/0.png" if case.painted is not None else ""
    (root / "prompts.txt").write_text(f"{CAPTIONS[1]}{shown}\n{CAPTIONS[0]} --n {CAPTIONS[2]}{shown}\n")
    words = ["encode", root / "photos", "--model", root / "model", "--cache", root / "cache", "-o", root / "m.json",
             "--prompts", root / "prompts.txt", "--resolution", 64, "--step", 32, "--dtype", "float32",
             "--compute", "float32", "--device", "cpu"]
    with pytest.raises(SystemExit) as ending:
        run(app, "prep", [str(word) for word in words])
    assert not ending.value.code
    return root / "m.json"


def soft_mask(path: Path, size: tuple[int, int], *, seed: int) -> None:
    """A mask whose values are all of 0 to 255, and whose edges cross latent cells."""
    coarse = np.random.default_rng(90 + seed).integers(0, 256, (5, 5), np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path)


def few(*builds: str) -> Any:
    """Only these are quick, for what takes seconds and differs little between families."""
    return pytest.mark.parametrize("case", [
        pytest.param(case, id=named(case), marks=[] if case.build in builds and not case.options else pytest.mark.slow)
        for case in CASES], indirect=True)


def setup(made: Path, model: Path | None = None, **settings: Any) -> Any:
    report = check(RunRequest(manifest=made, model=model),
                   parse({"precision": "fp32", "batch_size": 2, "steps": 2, **settings}, ""))
    assert report.setup is not None, [fault.message for fault in report.faults]
    return report.setup


# Values of the denoiser's config that allow no side above 64 pixels, or no picture that is not square.
SMALL = {"sd3": {"pos_embed_max_size": 4}, "auraflow": {"pos_embed_max_size": 16},
         "lumina2": {"axes_lens": [300, 4, 4]}, "hidream": {"max_resolution": [4, 4]}, "anima": {"max_size": [1, 4, 4]}}


@few("sd15", "sd3")
def test_what_a_denoiser_does_not_take_is_refused_before_it_is_encoded(case, made, prep, tmp_path):
    """As train check refuses it, in the same words; the model that made the cache is never refused."""
    family, original = FAMILIES[case.family], made.parent / "model"
    assert (case.family in SMALL) == bool(family.longest_side or family.largest_area)
    copy, own = tmp_path / "model", Path(family.denoiser, "config.json")
    shutil.copytree(original, copy)
    config = json.loads((original / own).read_bytes())
    words = [made.parent / "photos", "--model", copy, "-o", tmp_path / "m.json", "--resolution", 64, "--step", 32,
             "--dtype", "float32", "--compute", "float32", "--cache"]
    encode = ["encode", *words, tmp_path / "cache", "--device", "cpu"]
    decide = {"joint_attention_dim"} if case.options.get("without_t5") else set()  # of a missing encoder's rows
    for changes in (*({name: config[name] + 5} for name in family.config_widths if name not in decide),
                    SMALL.get(case.family, {})):
        (copy / own).write_text(json.dumps(config | changes))
        faults = check(RunRequest(manifest=made, model=str(copy)), parse({}, "")).faults
        assert [fault.exit_code for fault in faults] == [6] * bool(changes), faults
        seal = ["seal", *words, made.parent / "cache"]
        for command in ([*encode, "--dry-run"], seal, *([encode] if changes else [])):
            result = prep(*command)
            assert [result.code] == ([fault.exit_code for fault in faults] or [0]), result.err
            assert all(fault.message in result.err for fault in faults), result.err
        assert not (tmp_path / "cache").exists() and (tmp_path / "m.json").exists() == (not changes)
        (tmp_path / "m.json").unlink(missing_ok=True)


def damaged(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1])


def without_header(weights: Path) -> None:
    weights.write_bytes(b"\xff" * 64)


def of_quantized_weights(weights: Path) -> None:
    config = json.loads((weights.parent / "config.json").read_bytes())
    (weights.parent / "config.json").write_text(json.dumps({**config, "quantization_config": {"load_in_4bit": True}}))


def without_config(weights: Path) -> None:
    (weights.parent / "config.json").unlink()


def without_a_shard(weights: Path) -> None:
    shards = [f"{weights.stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weights.rename(weights.with_name(shards[0]))
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    weights.with_name(f"{weights.name}.index.json").write_text(json.dumps(index))


def without_levels(weights: Path) -> None:
    reschedule(weights.parents[1], num_train_timesteps=0)


def reschedule(model: Path, **changes: Any) -> None:
    """Changes the scheduler's config; a modular repository that has none gets one, as its index then says."""
    path, index = model / "scheduler" / "scheduler_config.json", model / "modular_model_index.json"
    config = scheduler_config(model)
    if schedule_in_code(model) is not None:
        path.parent.mkdir()
        kind = ["diffusers", config["_class_name"]]
        entry = {"type_hint": kind, "pretrained_model_name_or_path": str(model), "subfolder": "scheduler"}
        index.write_text(json.dumps({**json.loads(index.read_bytes()), "scheduler": [*kind, entry]}))
    path.write_text(json.dumps({**config, **changes}))
    assert schedule_in_code(model) is None and scheduler_config(model) == {**config, **changes}


@pytest.mark.few("sd15-", "sdxl-without_a_shard", "flux-damaged", "qwenimage-without_levels")
@pytest.mark.parametrize("harm", [damaged, without_header, of_quantized_weights, without_config, without_a_shard,
                                  without_levels])
def test_what_no_run_could_use_is_refused_before_it_is_encoded(case, made, harm, tmp_path):
    """In the words of train check."""
    family = FAMILIES[case.family]
    copy = shutil.copytree(made.parent / "model", tmp_path / "model")
    assert missing_files(copy, family) == ()
    harm(copy / family.denoiser / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ModelError) as caught:
        missing_files(copy, family)
    faults = check(RunRequest(manifest=made, model=str(copy)), parse({}, "")).faults
    assert [(fault.message, fault.hint, fault.exit_code) for fault in faults] == [
        (caught.value.message, caught.value.hint, 6)]


@pytest.mark.few("sd15]", "qwenimage]")
def test_a_model_without_its_denoiser_encodes(case, made, prep, tmp_path):
    """Unless the denoiser's config says what family it is, or what rows are. A note says that training needs it."""
    family, copy = FAMILIES[case.family], shutil.copytree(made.parent / "model", tmp_path / "model")
    lacks = f"{family.denoiser}/diffusion_pytorch_model.safetensors"
    without_a_shard(copy / lacks)
    (copy / family.denoiser / "diffusion_pytorch_model-00001-of-00002.safetensors").unlink()
    assert missing_files(copy, family) == (lacks,)  # the index alone, as where only small files were downloaded
    shutil.rmtree(copy / family.denoiser)
    known = len(family.predictions) == 1  # without the scheduler's config
    in_code = schedule_in_code(copy) is not None
    if known:
        shutil.rmtree(copy / "scheduler", ignore_errors=in_code)
    result = prep("encode", made.parent / "photos", "--model", copy, "--cache", tmp_path / "cache", "-o",
                  tmp_path / "m.json", "--resolution", 64, "--step", 32, "--device", "cpu", "--dry-run")
    needed = case.options.get("without_t5") or case.family in (
        "sd15", "sd15_inpaint", "sd21", "sd21_inpaint", "hidream")
    assert result.code == (6 if needed else 0), result.err
    both = known and not in_code
    lacks, them = (f"{lacks} and no scheduler/scheduler_config.json", "them") if both else (lacks, "it")
    said = f"note: {copy} has no {lacks}: encoding does without, but training needs {them}"
    assert (said in result.err) == (result.code == 0)


@pytest.mark.few
def test_settings_that_a_flow_has_not(case, made):
    flow = read_manifest(made).document["prediction"] == "flow"
    for name in ("offset", "pyramid"):
        found = check(RunRequest(manifest=made), parse({"noise": {name: 0.1}}, "")).faults
        assert [fault.message for fault in found] == [
            f"noise.{name} is 0.1, but models of family '{case.family}' predict a flow, which ends in plain noise: "
            "pictures are made from that"][:flow]
    assert not check(RunRequest(manifest=made), parse({"noise": {"perturbation": 0.1}}, "")).faults
    found = check(RunRequest(manifest=made), parse({"zero_terminal_snr": True}, "")).faults
    wanted = "zero_terminal_snr is on, but this model predicts flow, which already ends in pure noise"
    assert [fault.message for fault in found if "flow" in fault.message] == [wanted][:flow]
    dynamic = scheduler_config(made.parent / "model").get("use_dynamic_shifting") is True
    found = check(RunRequest(manifest=made), parse({"timesteps": {"shift_by_size": "schedule"}}, ""))
    assert bool(found.faults) == (not dynamic)
    if found.setup is not None:
        assert len(found.setup.model.shifts) == 2 and all(shift != 1 for shift in found.setup.model.shifts)
    found = check(RunRequest(manifest=made), parse({"loss": {"min_snr": 5.0}, "lora": {"format": "kohya"}}, "")).faults
    said = [fault.message for fault in found]
    wanted = f"loss.min_snr is 5, but models of family '{case.family}' predict a flow, which has no such weighting"
    assert (wanted in said) == flow
    wrong = "DDIMScheduler" if flow else "FlowMatchEulerDiscreteScheduler"
    (fault,) = check(RunRequest(manifest=made), parse({"sample": {"sampler": wrong}}, "")).faults
    assert fault.message.startswith(f"sample.sampler is '{wrong}', which cannot sample this model of family "
                                    f"'{case.family}', expected one of: {'FlowMatchEuler' if flow else 'DDIM'}")
    assert fault.hint == "leave sample.sampler out for the usual one"
    unknown = "lora.format is 'kohya', but kohya's names are not known for this family of models"
    assert (unknown in said) == (case.family in ("pixart_alpha", "pixart_sigma", "sana", "cogview4", "ovis",
                                                 "longcat_image", "longcat_image_edit", "qwenimage21", "flux3",
                                                 "kolors"))


@pytest.mark.few("sd15]", "flux]")
def test_what_check_counts_is_what_a_run_trains(made):
    """Also of every layer, as a regular expression may choose: HiDream's experts have a gate that is none."""
    found = setup(made, lora={"rank": 2, "conv_rank": 2, "targets": ["re:^(?!.*conv_depth)"]})
    denoiser = load(found.model.path, found.config, found.prediction, CPU, family=found.family.name)
    assert sum(value.numel() for value in denoiser.parameters.values()) == found.model.numbers
    kept = denoiser.model.state_dict().keys() - {name for name, _ in denoiser.model.named_parameters()}
    assert kept == found.family.buffers
    whole = setup(made, method="full")
    assert whole.model.numbers == sum(value.numel() for value in load(
        whole.model.path, whole.config, whole.prediction, CPU, family=whole.family.name).parameters.values())


def test_the_denoiser_takes_the_guidance_number_of_the_settings(case, made, ours):
    """By default that of diffusers' example; a model that takes none refuses the setting."""
    found = setup(made)
    takes = bool(ours.model.config.get("guidance_embeds"))
    with tiny_pipelines.known_warnings():
        report = check(RunRequest(manifest=made), parse({"precision": "fp32", "guidance_embedding": 1.0}, ""))
    assert bool(report.faults) == (not takes)
    if not takes:
        return
    rows = Rows(open_index(read_manifest(made)))
    other = load(found.model.path, report.setup.config, found.prediction, CPU, adapt=False, family=found.family.name)
    for denoiser, wanted in ((ours, 3.5), (other, 1.0)):
        with watched(denoiser.model) as said, torch.no_grad():
            predict(denoiser, noise(rows), torch.tensor([500]), Conditions(
                text=text_of(rows, CAPTIONS[0]), sizes_B6=torch.zeros(1, 6), **any_hole(ours, noise(rows))))
        assert [call["guidance"].tolist() for call in said] == [[wanted]]


@pytest.fixture(scope="module")
def ours(made) -> Any:
    """Our denoiser, for tests that do not change it."""
    found = setup(made)
    return load(found.model.path, found.config, found.prediction, CPU, adapt=False, family=found.family.name)


@pytest.fixture(scope="module")
def pipe(made, case) -> Any:
    """The family's own pipeline, for tests that do not change it."""
    return pipeline_of(made, case)


def pipeline_of(made: Path, case: Case) -> Any:
    with tiny_pipelines.known_warnings():
        pipe = tiny_pipelines.load(made.parent / "model")
    sampling = FAMILIES[case.family].sampling
    import diffusers

    config = dict(pipe.scheduler.config)
    if config.get("use_flow_sigmas"):
        config["shift"] = config["flow_shift"]  # SANA's solver along a flow has another name for it
    pipe.scheduler = getattr(diffusers, sampling.sampler).from_config(config, **sampling.sampler_options)
    pipe.set_progress_bar_config(disable=True)
    if case.family == "hidream":
        pipe.default_sample_size = 8  # its pictures all have the area of a square of this size, in latent cells
    case.mended(pipe)
    return pipe


@contextmanager
def watched(model: Any) -> Iterator[list[dict[str, Any]]]:
    """The arguments of each call of a denoiser, by name; those that are None are left out."""
    seen: list[dict[str, Any]] = []
    signature = inspect.signature(model.forward)

    def note(module: Any, args: Any, kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        plain = {"return_dict", "attention_kwargs", "joint_attention_kwargs", "cross_attention_kwargs"}
        seen.append({name: value for name, value in given.items() if value is not None and name not in plain})

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def text_of(rows: Rows, *captions: str) -> dict[str, torch.Tensor]:
    """The cached text rows of captions."""
    samples, refs = rows.index.samples, {}
    for sample in range(len(samples)):
        first = int(samples.text_offsets[sample])
        refs[samples.captions(sample)[0]] = rows.index.ref(int(samples.texts["shard"][first]),
                                                           int(samples.texts["row"][first]))
    return rows.text([refs[caption] for caption in captions])


def noise(rows: Rows, side: int = 64) -> torch.Tensor:
    facts = rows.index.manifest.document["latents"]
    cells = side // facts["factor"]
    return torch.from_numpy(np.random.default_rng(5).standard_normal((1, facts["channels"], cells, cells), np.float32))


def any_hole(ours: Any, latent: torch.Tensor) -> dict[str, Any]:
    """Conditions that a family takes which inpaints, for a latent."""
    if ours.family.inpainting is None:
        return {}
    count, _, height, width = latent.shape
    stream = torch.Generator().manual_seed(3)
    mask = torch.rand((1, ours.family.mask_channels, height, width), generator=stream).round()
    return {"references": [latent.roll(1)], "inpaint_mask": mask.expand(count, -1, -1, -1)}


def seen(case: Case, made: Path, caption: str, shown: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The text row of a caption with these pictures, as it would be cached."""
    from prep.models.text.encoder import TextEncoder

    family = FAMILIES[case.family]
    encoder = TextEncoder(made.parent / "model", family, TextOptions(max_length=family.text.max_length), device="cpu",
                          compute="float32", dtype="float32")
    row = encoder.encode_seen(caption, [np.asarray(stretched(picture, case.seen[picture.size]))
                                        for picture in shown["image"]])
    assert row is not None
    return {name: torch.from_numpy(array)[None] for name, array in row.items()}


def stretched(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    return picture.resize(size, Image.Resampling.LANCZOS)


@pytest.mark.parametrize("caption", CAPTIONS[:2], ids=["short", "long"])
def test_the_denoiser_is_given_what_the_pipeline_gives_it(case, made, ours, pipe, caption):
    rows = Rows(open_index(read_manifest(made)))
    latent = noise(rows)
    theirs = getattr(pipe, ours.family.denoiser)
    for shown, conditions in shown_of(case, made, pipe):
        with watched(theirs) as asked, torch.no_grad(), tiny_pipelines.known_warnings():
            pipe(prompt=caption, latents=case.packed(latent), num_inference_steps=2, height=64, width=64,
                 output_type="latent", **case.unguided, **shown)
        flow = ours.prediction == "flow"
        time = pipe.scheduler.sigmas[:1] if flow else pipe.scheduler.timesteps[:1]
        sizes = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])
        with watched(ours.model) as said, torch.no_grad(), tiny_pipelines.known_warnings():
            text = seen(case, made, caption, shown) if case.seen and shown else text_of(rows, caption)
            ours.family.predict(ours.model, latent * float(getattr(pipe.scheduler, "init_noise_sigma", 1.0)), time,
                               Conditions(text=text, sizes_B6=sizes, conditioner=ours.conditioner, **conditions))
        mine, usual = case.cut(said[0]), case.cut(asked[0])
        assert mine.keys() == usual.keys()
        for name in mine:
            one, other = mine[name], usual[name]
            if isinstance(one, torch.Tensor) and one.ndim == 1 and isinstance(other, torch.Tensor) and other.ndim == 0:
                one = one[0]
            assert same(one, other, 4e-6), (name, one, other)  # processors add in other orders


def shown_of(case: Case, made: Path, pipe: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pictures that are conditions, none first, then each with those before it: arguments of `__call__`, and latents
    as the VAE makes them, cropped by hand, and as the cache's facts normalize them. Of a family that inpaints two
    samples as the cache has them."""
    references = FAMILIES[case.family].references
    assert bool(case.sizes_shown) == (references is not None)
    if case.painted is not None:
        for number in (0, 3):
            yield case.painted(*files_of(made, number)), cached_hole(made, number)
        return
    yield {}, {}
    facts, pictures, latents = latents_of(read_manifest(made)), [], []
    for number, (width, height) in enumerate(case.sizes_shown):
        path = draw(made.parent / "shown" / f"{number}.png", (width, height), seed=50 + number)
        pictures.append(Image.open(path).convert("RGB"))
        if case.stretched:
            pixels = pixels_of(whole := stretched(pictures[-1], case.stretched[width, height]), whole.size)
        else:
            pixels = pixels_of(pictures[-1], (width // 16 * 16, height // 16 * 16))
        with torch.no_grad():
            latents.append(facts.normalize(case.encode(pipe.vae, pixels)))
        yield case.shown(pictures), {"references": tuple(latents)}


def files_of(made: Path, number: int) -> tuple[Image.Image, Image.Image]:
    """A picture and its mask."""
    return (Image.open(made.parent / "photos" / f"{number}.png").convert("RGB"),
            Image.open(made.parent / "photos" / f"{number}-masklabel.png").convert("L"))


def cached_hole(made: Path, number: int) -> dict[str, Any]:
    """What a sample's rows say of its hole."""
    rows = Rows(open_index(read_manifest(made)))
    samples = rows.index.samples
    sample = next(each for each in range(len(samples)) if samples.name(each) == f"{number}.png")
    view = int(samples.view_offsets[sample])
    (reference,) = samples.references_of(sample, view)
    place = rows.index.ref(*(int(samples.references[name][reference]) for name in ("latent_shard", "latent_row")))
    return {"references": [latents_of(rows.index.manifest).normalize(rows.latent(place))],
            "inpaint_mask": rows.mask(rows.index.mask_of(view)).float() / 255}


def painted_of(case: Case, made: Path) -> dict[str, Any]:
    """What a pipeline that inpaints is given for the prompts of `made`."""
    return {} if case.painted is None else case.painted(*files_of(made, 0))


@pytest.mark.few
def test_a_picture_from_cached_rows_is_the_pipeline_s(case, made, ours, pipe):
    index = open_index(read_manifest(made))
    rows = Rows(index)
    prompts, negatives, shown = list(cached(index)), [None, CAPTIONS[2]], [painted_of(case, made)] * 2
    assert len(prompts) == 2
    for given, conditions in shown_of(case, made, pipe):
        references = conditions.get("references", ())
        if references and case.painted is None:
            stored = latents_of(index.manifest).restore
            texts = {} if not case.seen else {name: seen(case, made, words, given) for name, words in (
                ("positive", prompts[1].prompt), ("negative", CAPTIONS[2]))}
            prompts.append(replace(prompts[1], references=tuple(map(stored, references)), **texts))
            negatives.append(CAPTIONS[2])
            shown.append(given)
    with tiny_pipelines.known_warnings():
        mine = pictures(ours, rows, made.parent / "model", prompts,
                        Sampling(steps=3, guidance=case.guidance, seed=1, size=(64, 64)))
    assert not any(np.array_equal(one, other) for one, other in itertools.combinations(mine, 2))
    facts = index.manifest.document["latents"]
    shape = (facts["channels"], 64 // facts["factor"], 64 // facts["factor"])
    for prompt, negative, given, picture in zip(prompts, negatives, shown, mine, strict=True):
        latent = torch.from_numpy(_noise(prompt.prompt, shape, 1))[None]
        told = {} if negative is None else negative_of(pipe, case, negative)
        with torch.no_grad(), tiny_pipelines.known_warnings():
            wanted = pipe(prompt=prompt.prompt, latents=case.packed(latent), num_inference_steps=3, height=64, width=64,
                          output_type="np", **{**case.guided, **told, **given}).images[0]
        usual = (tiny_pipelines.over_white(wanted) * 255).round().astype(np.int16)
        drawn = picture[:, -64:]  # beside its references
        assert np.abs(usual - drawn).max() <= 1, np.abs(usual - drawn).max()


FLOWS = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "DPMSolverMultistepScheduler",
         "DPMSolverSinglestepScheduler", "UniPCMultistepScheduler")
# By the build of a tiny pipeline: which of these it works with, by hand from its code; all others stop it.
BY_STEPS, BY_SHIFT = FLOWS, (FLOWS[0], *FLOWS[2:])
TAKEN = {"sd3": BY_STEPS, "sana": BY_STEPS, "auraflow": BY_STEPS, "flux": BY_SHIFT, "flux2": BY_SHIFT,
         "flux2_klein": BY_SHIFT, "ovis": BY_SHIFT, "zimage": FLOWS[:1], "cogview4": FLOWS[:1], "ernie": FLOWS[:1]}
BY_SIGMAS = (FLOWS[0], FLOWS[4])  # of the others
OF_FLOWS = [case for case in CASES if FAMILIES[case.family].predictions == ("flow",)]
QUICK = ("sd3", "flux")
TWO = pytest.mark.parametrize("case", [
    pytest.param(case, id=named(case), marks=[] if case.build in QUICK and not case.options else pytest.mark.slow)
    for case in OF_FLOWS], indirect=True)


def scheduled(made: Path, case: Case, sampler: str) -> Any:
    """The family's own pipeline with this scheduler, as diffusers' documentation says to change it."""
    import diffusers

    pipe = pipeline_of(made, case)
    config = scheduler_config(made.parent / "model")
    shift = config.get("flow_shift", config.get("shift"))
    more = {"shift": shift} if sampler.startswith("FlowMatch") else {
        "prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    pipe.scheduler = getattr(diffusers, sampler).from_config({**config, **more})
    return pipe


def from_prompt(pipe: Any, case: Case, index: Any, prompt: str, steps: int) -> np.ndarray:
    facts = index.manifest.document["latents"]
    shape = (facts["channels"], 64 // facts["factor"], 64 // facts["factor"])
    latent = torch.from_numpy(_noise(prompt, shape, 1))[None]
    with torch.no_grad(), tiny_pipelines.known_warnings():
        made = pipe(prompt=prompt, latents=case.packed(latent), num_inference_steps=steps, height=64, width=64,
                    output_type="np", **case.guided, **painted_of(case, index.manifest.path)).images[0]
    return (tiny_pipelines.over_white(made) * 255).round().astype(np.int16)


def taken_by(case: Case) -> tuple[str, ...]:
    """With the scheduler's config of the tiny pipeline."""
    if case.options.get("guidance") is False:  # FLUX.1-schnell shifts no timesteps, but its pipeline gives a shift
        return BY_SIGMAS
    return TAKEN.get(case.build, BY_SIGMAS)


@pytest.mark.slow
@TWO
def test_pictures_of_every_sampler_are_the_pipeline_s(case, made, ours):
    """A sampler that is refused stops the pipeline, too."""
    index = open_index(read_manifest(made))
    rows, first = Rows(index), cached(index)[:1]
    for sampler in FLOWS:
        asked = check(RunRequest(manifest=made), parse({"precision": "fp32", "sample": {"sampler": sampler}}, ""))
        pipe = scheduled(made, case, sampler)
        if sampler not in taken_by(case):
            (fault,) = asked.faults
            assert fault.message.endswith(f"expected one of: {', '.join(taken_by(case))}"), fault.message
            with pytest.raises((TypeError, ValueError, AssertionError, AttributeError)):
                from_prompt(pipe, case, index, first[0].prompt, 3)
            continue
        assert not asked.faults, (sampler, asked.faults)
        with tiny_pipelines.known_warnings():
            (mine,) = pictures(ours, rows, made.parent / "model", first,
                               Sampling(steps=3, guidance=case.guidance, seed=1, size=(64, 64), sampler=sampler))
        usual = from_prompt(pipe, case, index, first[0].prompt, 3)
        drawn = mine[:, -64:]
        assert np.abs(usual - drawn).max() <= 1, (sampler, np.abs(usual - drawn).max())


SHIFTS = {"static": {"shift": 3.0, "use_dynamic_shifting": False},
          "dynamic": {"shift": 1.0, "use_dynamic_shifting": True, "time_shift_type": "exponential"},
          "linear": {"shift": 1.0, "use_dynamic_shifting": True, "time_shift_type": "linear"}}


@pytest.mark.slow
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("case", OF_FLOWS, ids=named, indirect=True)
def test_samplers_of_other_schedules(case, made, shift, tmp_path):
    """What is said of a scheduler's config is true of the pipeline with a model that has such a config."""
    index = open_index(read_manifest(made))
    shutil.copytree(made.parent / "model", tmp_path / "model")
    reschedule(tmp_path / "model", **SHIFTS[shift])
    moved, prompt = tmp_path / made.name, cached(index)[0].prompt
    if shift != "static" and case.family in ("sana", "auraflow", "ernie", "flux3", "anima"):
        with pytest.raises(ValueError, match="mu"):  # no size is told to the usual scheduler, either
            from_prompt(scheduled(moved, case, FLOWS[0]), case, index, prompt, 3)
        return
    taken = samplers(FAMILIES[case.family].sampling.solvers, scheduler_config(tmp_path / "model"))
    for sampler in FLOWS:
        pipe = scheduled(moved, case, sampler)
        if sampler in taken:
            assert from_prompt(pipe, case, index, prompt, 3).std() > 1
        else:
            with pytest.raises((TypeError, ValueError, AssertionError, AttributeError)):
                from_prompt(pipe, case, index, prompt, 3)


def test_a_time_that_runs_backwards_is_euler_s_alone():
    assert samplers(FAMILIES["sd3"].sampling.solvers, {"invert_sigmas": True}) == FLOWS[:1]


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_FLOWS, ids=named, indirect=True)
def test_every_sampler_follows_the_same_flow(case, made, ours):
    """With many steps all end in nearly the same picture, whatever lies between."""
    index = open_index(read_manifest(made))
    rows, first = Rows(index), cached(index)[:1]
    with tiny_pipelines.known_warnings():
        ends = [pictures(ours, rows, made.parent / "model", first, Sampling(
            steps=60, guidance=case.guidance, seed=1, size=(64, 64), sampler=sampler))[0].astype(np.int16)
            for sampler in taken_by(case)]
    for sampler, end in zip(taken_by(case), ends, strict=True):
        assert np.abs(end - ends[0]).mean() < 3, (sampler, np.abs(end - ends[0]).mean())


def negative_of(pipe: Any, case: Case, text: str) -> dict[str, Any]:
    """The arguments of `__call__` for a negative prompt; none if the family is not sampled with one."""
    taken = inspect.signature(pipe.__call__).parameters
    if case.family != "flux" and "negative_prompt" in taken:
        return {"negative_prompt": text}
    if case.family == "flux" or "negative_prompt_embeds" not in taken:
        return {}
    with torch.no_grad():
        return {"negative_prompt_embeds": pipe.encode_prompt(text, device="cpu")[0]}


def test_the_loss_from_the_cache_is_the_loss_from_pictures(case, made, ours, pipe):
    """The other side in plain lines: pictures by Pillow, the pipeline's own parts, and the batch's noise."""
    found = setup(made)
    rows = Rows(found.index)
    requests = draws.training(found.index, found.plan, 0, 2, timesteps=ours.timesteps)
    model = getattr(pipe, ours.family.denoiser)
    with batches(rows, requests, masked=False, pinned=False) as feed, torch.no_grad(), tiny_pipelines.known_warnings():
        for batch in feed:
            given = forward(ours, batch, latents_of(found.manifest), found.config.loss)
            losses = []
            for number, shot in enumerate(batch.draws):
                name, bucket = found.index.samples.name(shot.sample), bucket_of(found, shot)
                latent = case.normalized(pipe.vae, case.encode(pipe.vae, image_of(made, name, bucket)))
                losses.append(loss_by_hand(ours, case, pipe, model, latent, batch, number, made, name))
            ours_B = sample_losses(given, found.config.loss)
            assert torch.allclose(ours_B, torch.stack(losses).view(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.few
def test_the_base_predicts_beside_its_adapters(case, made, ours):
    """As it does without any, and what is trained does not: what `preserve` compares."""
    found = setup(made, lora={"rank": 2, "targets": "all-linear"})
    trainee, latents = create_state(found, CPU), latents_of(found.manifest)
    scattered(trainee.denoiser.parameters, 1)
    requests = draws.training(found.index, found.plan, 0, 1, timesteps=ours.timesteps)
    with batches(Rows(found.index), requests, masked=False, pinned=False) as feed, torch.no_grad():
        for batch in feed:
            plain = forward(ours, batch, latents, found.config.loss).predicted_BChw
            given = forward(trainee.denoiser, batch, latents, found.config.loss, Preserve(prior=True), together=True)
            assert torch.equal(given.base_BChw, plain) and not torch.allclose(given.predicted_BChw, plain, rtol=0.1)


def bucket_of(found: Any, shot: Any) -> tuple[int, int]:
    size: tuple[int, int] = found.index.manifest.buckets[int(found.index.samples.bucket[shot.sample])]
    return size


def image_of(made: Path, name: str, bucket: tuple[int, int]) -> torch.Tensor:
    """[1, 3, H, W] from -1 to 1: the sizes of the test need at most a crop of the center."""
    with Image.open(made.parent / "photos" / name) as opened:
        return pixels_of(opened.convert("RGB"), bucket)


def pixels_of(picture: Image.Image, bucket: tuple[int, int]) -> torch.Tensor:
    """[1, 3, H, W] of the picture's center."""
    left, top = (picture.width - bucket[0]) // 2, (picture.height - bucket[1]) // 2
    pixels = np.asarray(picture.crop((left, top, left + bucket[0], top + bucket[1])), np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1


def hole_by_hand(case: Case, pipe: Any, made: Path, name: str, like: torch.Tensor) -> dict[str, Any]:
    """What a denoiser that inpaints is given for a picture: the mask's first pixel of each cell, or all of them."""
    if case.painted is None:
        return {}
    bucket = like.shape[3] * 8, like.shape[2] * 8
    mask = (pixels_of(files_of(made, int(Path(name).stem))[1].convert("RGB"), bucket)[:, :1] >= 0).float()
    masked = image_of(made, name, bucket) * (1 - mask)
    channels = FAMILIES[case.family].mask_channels
    cells = mask[..., ::8, ::8] if channels == 1 else torch.nn.functional.pixel_unshuffle(mask, 8)
    return {"references": [case.normalized(pipe.vae, case.encode(pipe.vae, masked))], "inpaint_mask": cells}


def loss_by_hand(ours: Any, case: Case, pipe: Any, model: Any, latent: torch.Tensor, batch: Any, number: int,
                 made: Path, name: str) -> torch.Tensor:
    """The mean squared error of one sample, whose text is encoded anew."""
    noise, timestep = batch.noise_BChw[number:number + 1], batch.timestep_B[number:number + 1]
    if ours.prediction == "flow":
        level = ours.levels[timestep]
        noisy, target, time = (1 - level) * latent + level * noise, noise - latent, level
    else:
        from diffusers import DDPMScheduler

        scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
        noisy = scheduler.add_noise(latent, noise, timestep)
        velocity = pipe.scheduler.config.prediction_type == "v_prediction"
        target, time = (scheduler.get_velocity(latent, noise, timestep) if velocity else noise), timestep
    caption = (made.parent / "photos" / name).with_suffix(".txt").read_text()
    fresh = {key: value.float()[None] for key, value in ours.family.text.encode(
        pipe, [caption], options_for(ours), CPU)[0].items()}
    if ours.family.text.layout == "trimmed":
        fresh["attention_mask"] = torch.ones(1, next(iter(fresh.values())).shape[1], dtype=torch.uint8)
    parts = ours.family.trained_with
    answer = ours.family.predict(model, noisy, time, Conditions(
        text=fresh, sizes_B6=batch.sizes_B6[number:number + 1],
        conditioner=getattr(pipe, parts[1]) if parts[1:] else None, **hole_by_hand(case, pipe, made, name, noise)))
    return functional.mse_loss(answer, target)


def options_for(ours: Any) -> Any:
    return TextOptions(max_length=ours.family.text.max_length)


def test_a_batch_of_unequal_captions_equals_its_samples_alone(case, made, ours, pipe):
    rows = Rows(open_index(read_manifest(made)))
    latent = noise(rows).expand(2, -1, -1, -1)
    sizes = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]]).expand(2, 6)
    time = torch.tensor([300, 300])
    *_, (given, conditions) = shown_of(case, made, pipe)
    shown, mask, answers = conditions.get("references", ()), conditions.get("inpaint_mask"), []
    mask = None if mask is None else torch.cat([mask, 1 - mask])
    for references in {() if mask is None else None, tuple(torch.cat([each, -each]) for each in shown)} - {None}:
        both, texts = text_of(rows, *CAPTIONS[:2]), [text_of(rows, caption) for caption in CAPTIONS[:2]]
        if case.seen and references:
            texts = [seen(case, made, caption, given) for caption in CAPTIONS[:2]]
            both = {name: pad_sequence([text[name][0] for text in texts], batch_first=True) for name in both}
        with torch.no_grad(), tiny_pipelines.known_warnings():
            together = predict(ours, latent, time, Conditions(text=both, sizes_B6=sizes, references=references,
                                                              inpaint_mask=mask))
            alone = [predict(ours, latent[:1], time[:1], Conditions(
                text=text, sizes_B6=sizes[:1], references=[each[number:number + 1] for each in references],
                inpaint_mask=None if mask is None else mask[number:number + 1]))
                for number, text in enumerate(texts)]
        assert torch.allclose(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(alone[0], alone[1], rtol=1e-3, atol=1e-4), "the captions make no difference"
        answers.append(together)
    if shown and mask is None:
        assert not torch.allclose(answers[0], answers[-1], rtol=1e-3, atol=1e-4), "nor do the pictures"


def test_a_divided_denoiser_is_refused_where_ranks_would_call_it_unequally_often(made, ours):
    rows, family = Rows(open_index(read_manifest(made))), ours.family
    with watched(ours.model) as calls, torch.no_grad(), tiny_pipelines.known_warnings():
        latent = noise(rows).expand(2, -1, -1, -1)
        predict(ours, latent, torch.tensor([300, 300]), Conditions(
            text=text_of(rows, *CAPTIONS[:2]), sizes_B6=torch.zeros(2, 6), **any_hole(ours, latent)))
    unequal = family.text.shortest < family.text.longest
    assert len(calls) == (2 if family.by_length == "always" and unequal else 1)
    for settings, wrong in (({}, family.by_length != "never"), ({"micro_batch": 1}, False),
                            ({"gradient_checkpointing": False}, family.by_length == "always")):
        config = parse({"precision": "fp32", "batch_size": 2, "parallel": {"shard": True}, **settings}, "")
        said = [fault.message for fault in check(RunRequest(manifest=made), config).faults]
        wanted = f"micro_batch is 2, expected 1 where parallel.shard divides a denoiser of family '{family.name}'"
        assert any(message.startswith(wanted) for message in said) == wrong, said


def test_a_denoiser_without_dropout_draws_nothing_itself(made, ours):
    """Torch's generators are then not seeded for each step."""
    rows = Rows(open_index(read_manifest(made)))
    assert not has_dropout(ours.model)
    before = torch.get_rng_state()
    ours.model.train()
    try:
        with torch.no_grad(), tiny_pipelines.known_warnings():
            predict(ours, noise(rows), torch.tensor([500]), Conditions(
                text=text_of(rows, CAPTIONS[0]), sizes_B6=torch.zeros(1, 6), **any_hole(ours, noise(rows))))
    finally:
        ours.model.eval()
    assert torch.equal(torch.get_rng_state(), before)


def test_padding_is_masked_or_part_of_a_row(case, made, ours, pipe):
    """Rows are stored without padding where the denoiser masks it, and whole where it is an input like any other."""
    rows = Rows(open_index(read_manifest(made)))
    text = ours.family.text
    tokens = [name for name, dims in text.arrays.items() if dims[0] == "token"]
    latent, sizes = noise(rows), torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]])

    def answer(given: dict[str, torch.Tensor]) -> torch.Tensor:
        count = len(given[tokens[0]])
        with torch.no_grad(), tiny_pipelines.known_warnings():
            several = latent.expand(count, -1, -1, -1)
            return predict(ours, several, torch.tensor([300]).expand(count), Conditions(
                text=given, sizes_B6=sizes.expand(count, -1), **any_hole(ours, several)))[:1]

    def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
        return float((one - other).abs().max()) > 2e-5 * float(one.abs().max())  # of float32: rounding is 1e-6

    alone = text_of(rows, CAPTIONS[0])
    if text.layout == "full":
        used = case.surrounding + max(len(one(CAPTIONS[0])["input_ids"]) for name, one in pipe.components.items()
                                      if name.startswith("tokenizer") and one is not None)
        kept = slice(-used, None) if case.padded_left else slice(used)
        short = {name: array[:, kept] if name in tokens else array for name, array in alone.items()}
        assert all(short[name].shape[1] == used < alone[name].shape[1] for name in tokens)
        assert differ(answer(alone), answer(short)), "padding makes no difference: rows can be stored without it"
        return
    length = int(alone["attention_mask"].sum())
    short = {name: array[:, :length] if name in (*tokens, "attention_mask") else array for name, array in alone.items()}
    padded = text_of(rows, *CAPTIONS[:2])  # a longer row beside it, so that its padding is not cut off
    if text.shortest == text.longest:  # then rows with a picture are longer
        padded = {name: functional.pad(array, (0,) * 2 * (array.ndim - 2) + (0, 32)) for name, array in padded.items()}
        padded["attention_mask"][1] = 1
    padding = padded["attention_mask"] == 0
    assert padding[0, length:].all() and not padding[0, :length].any() and padding.shape[1] > length + 16
    for name in tokens:
        junk = torch.randn(padded[name].shape, generator=torch.Generator().manual_seed(0))
        padded[name][padding] = 10 * junk[padding]
    assert torch.allclose(answer(padded), answer(short), rtol=1e-4, atol=1e-5)
    unmasked = padded | {"attention_mask": torch.ones_like(padded["attention_mask"])}
    assert differ(answer(unmasked), answer(short)), "the denoiser does not look at these tokens"


@pytest.mark.few("sd15-")
@pytest.mark.parametrize(("method", "quantization"), [
    ("lora", "none"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("full", "none"), ("lora", "int8")))])
def test_the_memory_of_a_step_is_known_before_weights_are_loaded(method, quantization, made, monkeypatch):
    """Also of rows as large as those of real models, whose memory is not touched."""
    monkeypatch.setattr(hollow, "SMALL", 600)  # the data of larger tensors cannot be asked for
    found = setup(made, method=method, gradient_checkpointing=method == "full", ema={"decay": 0.9},
                  quantization=quantization)
    (wanted, allocated), given = counted(found), count(found, room_of("cpu")).parts
    assert sum(given.values()) == pytest.approx(sum(wanted.values()), rel=0.01)
    if found.family.name != "sana" or method == "lora":  # whose convolutions oneDNN pads by groups, to 16 channels
        assert sum(given.values()) == pytest.approx(allocated, rel=0.05)
    same_parts = {"weights", "adapters", "average", "inputs"}
    assert {name: given.get(name) for name in same_parts} == {name: wanted.get(name) for name in same_parts}


def trained(found: Any, offload: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Its adapters after two steps, and the model."""
    trainee = create_state(found, CPU, offload=offload)
    request = draws.trial(found.index, found.plan, found.config.micro_batch)
    with batches(Rows(found.index), iter([request] * 2), masked=found.masked, pinned=False) as feed:
        for step, batch in enumerate(feed):
            forward_backward(trainee, found.config, batch)
            clip_gradients(trainee, found.config)
            apply_gradients(trainee, found, step)
    return {name: value.detach() for name, value in trainee.denoiser.parameters.items()}, trainee.denoiser.model


@pytest.mark.few("sd15]", "flux]")
def test_steps_with_blocks_in_host_memory_are_those_without(case, made, monkeypatch):
    """Each family has blocks, and of no more than two of them there are weights at a time. What they are recomputed
    from is in host memory, too; the steps are those without gradient checkpointing."""
    settings = {"optimizer": {"lr": 0.05}, "lora": {"rank": 2, "targets": "all-linear"}}
    resident, away = watch_residents(monkeypatch), watch_inputs(monkeypatch)
    wanted, whole = trained(setup(made, **settings, gradient_checkpointing=False), 0)
    assert not away
    found = setup(made, **settings, gradient_checkpointing="offload")
    blocks = offload.repeated_blocks(whole)
    assert blocks and not resident
    given, model = trained(found, len(blocks))
    assert offload.repeated_blocks(model) == [one for one in model.modules() if "forward" in vars(one)]
    assert {count for count, _ in resident} <= {1, 2} and len(resident) % len(blocks) == 0
    assert len(resident) >= 2 * 2 * len(blocks) and len(away) >= 2 * len(blocks)
    for name, value in wanted.items():
        if case.family == "chroma":  # which recomputes texts of one length at a time: its sums are rounded otherwise
            assert torch.allclose(given[name], value, atol=1e-4), name
        else:
            assert torch.equal(given[name], value), name


@pytest.mark.few("flux", "zimage")
@few("sd15", "flux", "zimage")
def test_steps_beside_a_training_adapter_are_those_on_the_merged_model(case, made, tmp_path):
    """Of one with the names that ComfyUI reads, where a layer may be several of diffusers'. Pictures are those without,
    to the bit."""
    facts, path = FAMILIES[case.family].lora, tmp_path / "lora.safetensors"
    targets = next(each for each in ("kohya-conv", "kohya", "all-linear") if each in facts.presets)
    named = setup(made, lora={"rank": 2, "alpha": 1.0, "targets": targets,
                              "format": "diffusers" if facts.kohya is None else "kohya"})
    training_adapter(named, path)
    merge(MergeRequest(lora=path, model=made.parent / "model", output=tmp_path / "merged", strength=0.5))
    settings = {"lora": {"rank": 2, "targets": "attention"}}
    runs = {"alone": setup(made, **settings), "merged": setup(made, tmp_path / "merged", **settings),
            "beside": setup(made, **settings, base={"adapter": str(path), "adapter_scale": 0.5})}
    states = {name: create_state(found, CPU) for name, found in runs.items()}
    gradients = {name: gradients_of(states[name], found) for name, found in runs.items()}
    for name, wanted in gradients["merged"].items():
        size = wanted.abs().max()
        assert (gradients["beside"][name] - wanted).abs().max() <= 1e-3 * size + 1e-7, name
    assert any((gradients["alone"][name] - value).abs().max() > 0.05 * value.abs().max()
               for name, value in gradients["merged"].items()), "the training adapter makes no difference"
    rows = Rows(open_index(read_manifest(made)))
    with tiny_pipelines.known_warnings():
        shown = {name: pictures(states[name].denoiser, rows, made.parent / "model", cached(rows.index)[:1],
                                Sampling(steps=2))[0] for name in ("alone", "beside")}
    assert np.array_equal(shown["alone"], shown["beside"])
    again = gradients_of(states["beside"], runs["beside"])
    assert all(torch.equal(again[name], value) for name, value in gradients["beside"].items()), "it stayed off"


def gradients_of(trainee: Any, found: Any) -> dict[str, torch.Tensor]:
    """Those of adapters of random values after one pass."""
    scattered(trainee.denoiser.parameters, 2)
    trainee.model.drop_gradients(trainee.denoiser.parameters)
    request = draws.trial(found.index, found.plan, found.config.micro_batch)
    with batches(Rows(found.index), iter([request]), masked=found.masked, pinned=False) as feed:
        for batch in feed:
            forward_backward(trainee, found.config, batch)
    return {name: value.grad.clone() for name, value in trainee.denoiser.parameters.items() if value.grad is not None}


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_what_a_run_writes_of_itself_is_read_again(method, made, tmp_path):
    """Facts that only some families have, like numbers for each channel of latents. No tensors and no training: all
    commands on whole runs are in `test_readers_of_runs.py`."""
    found = setup(made, method=method)
    claim_run(Local(tmp_path), found)
    save(tmp_path, state_of(found, 1), [], keep=0)
    start = find_start(Local(tmp_path))
    assert start.state == replace(state_of(found, 1), files={})
    assert compare(start, found, adopt=False) == ResumeComparison()
    assert read_run(Local(tmp_path)).config == found.config and own_manifest(read_run(Local(tmp_path))) is not None


@few("sd15", "flux", "sana")
def test_two_steps_of_lora_change_the_pipeline_s_picture(case, made, tmp_path):
    found = setup(made, optimizer={"lr": 0.05}, lora={"rank": 2, "alpha": 1.0}, sample={"every": 0},
                  validation={"every": 0})
    with tiny_pipelines.known_warnings():
        go(found, tmp_path / "run")
    pipe = pipeline_of(made, case)
    before = weights_of(pipe, found.family.denoiser)
    one = drawn(pipe)
    model = getattr(pipe, found.family.denoiser)
    if not hasattr(pipe, "load_lora_weights"):
        load_by_peft(model, tmp_path / "run" / "lora.safetensors", found.family.denoiser)
        assert not np.array_equal(one, drawn(pipe))
        return
    pipe.load_lora_weights(tmp_path / "run", weight_name="lora.safetensors")
    assert model.peft_config, "diffusers ignored the file"
    assert strength_of(model) == pytest.approx(0.5 * strength_in(tmp_path / "run" / "lora.safetensors"), rel=1e-5)
    assert not np.array_equal(one, drawn(pipe))
    pipe.unload_lora_weights()
    after = weights_of(pipe, found.family.denoiser)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@few("sd15", "flux", "zimage")
def test_the_pipeline_with_a_lora_file_draws_what_its_adapters_draw(case, made, tmp_path):
    """Each tensor is loaded by its name, by code that is not ours, and the other pipeline's adapters were never in a
    file: one that exchanges two layers of the same shape gives another picture."""
    found = setup(made, lora={"rank": 2, "alpha": 1.0, "targets": "all-linear"})
    settings, naming, component = found.config.lora, naming_of(found.family), found.family.denoiser
    adapted, pipe, path = pipeline_of(made, case), pipeline_of(made, case), tmp_path / "lora.safetensors"
    plain = drawn(pipe)
    weights = lora.attach(getattr(adapted, component), settings, 0, FAMILIES[case.family].lora.presets)
    stream = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in weights.values():
            value.normal_(std=0.5, generator=stream)
    wanted = drawn(adapted)
    assert np.abs(plain - wanted).max() > 0.01, "the adapters make no difference"
    for layout in sorted({naming.format_of(settings), "diffusers"}):
        named = replace(settings, format=layout)
        tensors = lora.pack(weights, named, naming)
        read = lora.unpack(tensors, weights, naming)
        assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)
        save_file(tensors, path, metadata=lora.describe(weights, named, naming))
        if hasattr(pipe, "load_lora_weights"):
            pipe.load_lora_weights(tmp_path, weight_name=path.name)
            assert np.abs(drawn(pipe) - wanted).max() < 1e-5, layout
            pipe.unload_lora_weights()
        else:
            load_by_peft(getattr(pipe, component), path, component)
            assert np.abs(drawn(pipe) - wanted).max() < 1e-5, layout


@pytest.mark.few
def test_a_run_in_names_that_diffusers_does_not_read(case, made, tmp_path):
    """Its file begins a new run with the same bits; the card says who reads it."""
    kohya = FAMILIES[case.family].lora.kohya
    if kohya is None or kohya.imported:
        pytest.skip("diffusers reads this family's names, or there are none")
    targets = "kohya" if "kohya" in FAMILIES[case.family].lora.presets else "all-linear"
    settings = {"lora": {"rank": 2, "format": "kohya", "targets": targets}, "optimizer": {"lr": 0.05},
                "sample": {"every": 0}, "validation": {"every": 0}}
    with tiny_pipelines.known_warnings():
        found = setup(made, **settings)
        go(found, tmp_path / "run")
        report = check(RunRequest(manifest=made, init=Local(tmp_path / "run" / "lora.safetensors")),
                       parse({"precision": "fp32", "batch_size": 2, "steps": 2, **settings}, ""))
        assert report.faults == ()
        weights = create_state(report.setup, CPU).denoiser.weights
    tensors = load_file(tmp_path / "run" / "lora.safetensors")
    again = lora.pack(weights, report.setup.config.lora, naming_of(found.family))
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], value) for name, value in tensors.items())
    assert all(value.any() for value in tensors.values())
    text = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert "diffusers reads no LoRA of this family with these names" in text and "ComfyUI/models/loras" in text
    assert "load_lora_weights" not in text
    with safe_open(tmp_path / "run" / "lora.safetensors", framework="pt") as file:
        assert file.metadata()["ss_network_module"] == kohya.module
    if case.family in ("sd3", "auraflow"):  # halves of rows exchanged
        (fault,) = check(RunRequest(manifest=made),
                         parse({"lora": {"kind": "lokr", "targets": ["norm_out.linear"]}}, "")).faults
        assert fault.message == ("lora.kind is 'lokr', but in kohya's names 'norm_out.linear' has the halves of its "
                                 "rows exchanged")


def strength_of(model: Any) -> float:
    """The sum of what adapters add to each layer's weight, as Frobenius norms, with their scale."""
    return sum(float((module.lora_B[name].weight.flatten(1) @ module.lora_A[name].weight.flatten(1)).norm().detach()
                     * module.scaling[name])
               for module in model.modules() if hasattr(module, "lora_A") for name in module.lora_A)


def strength_in(path: Path) -> float:
    """The same of a LoRA file, without scale."""
    tensors, ends = load_file(path), {".lora_down.weight": ".lora_up.weight", ".lora_A.weight": ".lora_B.weight"}
    return sum(float((tensors[name.removesuffix(down) + up].flatten(1) @ tensors[name].flatten(1)).norm())
               for name in tensors for down, up in ends.items() if name.endswith(down))


def load_by_peft(model: Any, path: Path, component: str) -> None:
    """Loads a LoRA file into a denoiser that diffusers has no loader for: every tensor finds its place."""
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    tensors = {name.removeprefix(f"{component}."): value for name, value in load_file(path).items()}
    config = LoraConfig(**{name.removeprefix(f"{component}."): value for name, value in metadata.items()})
    inject_adapter_in_model(config, model)
    adapters = get_peft_model_state_dict(model)
    assert tensors.keys() == adapters.keys()
    assert not set_peft_model_state_dict(model, tensors).unexpected_keys
    assert config.lora_alpha / config.r == 0.5


def weights_of(pipe: Any, component: str) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in getattr(pipe, component).state_dict().items()}


def drawn(pipe: Any) -> np.ndarray:
    with tiny_pipelines.known_warnings(), torch.no_grad():
        return tiny_pipelines.draw(pipe, CAPTIONS[0])
