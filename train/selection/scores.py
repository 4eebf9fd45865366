"""Scores checkpoints by the embeddings of their pictures, and proposes one of them. Arrays alone, no model.

The rule: of the checkpoints that copy no training picture and whose drift is below 1, the one whose pictures resemble
the held-out pictures most; the earliest of those that no other exceeds by more than two standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prep.embedding.rows import Rows
from prep.formatting import counted
from prep.similarity.duplicates import threshold
from prep.similarity.neighbors import nearest
from prep.similarity.options import SimilarityOptions
from prep.similarity.vectors import Doubles, Integers, vectors_of

NEAREST = SimilarityOptions().neighbors  # pictures of the data set whose mean cosine is the likeness of a drawn one
MOST_DRIFT = 1.0  # at which pictures resemble the base model's of the same seed no more than these resemble one another
ERRORS = 2.0  # standard errors of the mean of paired differences, about 95 of 100 of a normal distribution
APART = 1e-3  # how far the base model's pictures are from one another at least: less says nothing of drift


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """The pictures of a data set: first those that train, then those that are held out."""

    rows: Rows  # [N, D]
    names: tuple[str, ...]
    training: int  # how many train

    @property
    def held_out(self) -> int:
        """How many are held out."""
        return len(self.rows) - self.training

    @property
    def least(self) -> float:
        """The cosine with a training picture from which a drawn one is a copy: that of near-duplicates in the set."""
        return threshold(vectors_of(self.rows[: self.training]).mean(), SimilarityOptions().near)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A drawn picture that is nearly a training picture."""

    drawn: int
    name: str  # of the training picture
    cosine: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Likeness:
    """How drawn pictures resemble those of a data set."""

    training_P: Doubles  # of each drawn picture: its mean cosine with the `NEAREST` training pictures
    held_out_P: Doubles | None  # the same of held-out ones; None: none is held out
    nearest: float  # the highest cosine of one with a training picture
    copies: tuple[Copy, ...]

    @property
    def decisive_P(self) -> Doubles:
        """What the rule compares: with held-out pictures, or with those that train if none is held out."""
        return self.training_P if self.held_out_P is None else self.held_out_P


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A checkpoint and its scores."""

    name: str
    step: int
    likeness: Likeness
    drift: float | None  # None: not known
    validation: float | None  # loss at its step; None: the log has none
    fit: float | None  # of its pictures and their prompts; None: the vision model reads no texts

    @property
    def excluded(self) -> tuple[str, ...]:
        """Why it is out of bounds; empty if it is not."""
        copies = len(self.likeness.copies)
        return (*((f"{counted(copies, 'picture')} nearly as in the training set",) if copies else ()),
                *((f"drift {self.drift:.2f}",) if self.drift is not None and self.drift >= MOST_DRIFT else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The checkpoint to take, and why."""

    name: str | None  # None: none is within bounds
    reason: str


def likeness(collection: Collection, drawn_PD: Rows, least: float) -> Likeness:
    """Compares drawn pictures with a data set; `least` is the cosine of a copy."""
    count, training = len(collection.rows), collection.training
    vectors = vectors_of(np.concatenate([collection.rows, drawn_PD]))
    drawn, trained = _numbers(count, len(vectors)), _numbers(0, training)
    near = nearest(vectors, drawn, trained, min(NEAREST, training))
    held_out = None if not collection.held_out else nearest(
        vectors, drawn, _numbers(training, count), min(NEAREST, collection.held_out)).cosines.mean(axis=1)
    best = near.cosines[:, 0]
    return Likeness(training_P=near.cosines.mean(axis=1), held_out_P=held_out, nearest=float(best.max()),
                    copies=tuple(Copy(drawn=place, cosine=float(best[place]),
                                      name=collection.names[int(near.others[place, 0])])
                                 for place in np.flatnonzero(best >= least).tolist()))


def drift(base_ND: Rows, drawn_ND: Rows) -> float | None:
    """How far pictures are from the base model's of the same prompts and seeds: the distance (1 - cosine) of the pairs,
    in units of that of the base model's pictures from one another. 0: as the base model's; `None`: these are all alike.
    """
    count, apart = len(base_ND), 1 - vectors_of(base_ND).mean()
    if count < 2 or apart < APART:
        return None
    pairs = vectors_of(np.concatenate([base_ND, drawn_ND])).cosines(_numbers(0, count), _numbers(count, 2 * count))
    return float((1 - pairs).mean() / apart)


def prompt_fit(drawn_PD: Rows, prompts_PD: Rows) -> float:
    """How well pictures fit the prompts that they were drawn from: the mean cosine of the pairs. That is the measure of
    CLIPScore (Hessel et al. 2021), 2.5 max(cosine, 0), without its factor, which is for CLIP's cosines alone."""
    count = len(drawn_PD)
    pairs = vectors_of(np.concatenate([drawn_PD, prompts_PD])).cosines(_numbers(0, count), _numbers(count, 2 * count))
    return float(pairs.mean())


def propose(candidates: Sequence[Candidate]) -> Proposal:
    """The checkpoint to take, by the rule above; `candidates` are in the order of their steps, and drew the same."""
    within = [each for each in candidates if not each.excluded]
    if not within:
        return Proposal(name=None, reason="no checkpoint is within bounds: each draws training pictures again, or is "
                        f"as far from the base model as a drift of {MOST_DRIFT:g}")
    best = max(within, key=lambda each: float(each.likeness.decisive_P.mean()))
    tied = [each for each in within if not any(_better(other, each) for other in within)]  # with the best among them
    chosen, like = tied[0], _set_of(best)
    bounded = len(within) < len(candidates)
    if len(within) == 1:
        return Proposal(name=chosen.name, reason="it is the only one within bounds" if bounded else
                        "it is the only one that was kept")
    if len(tied) == len(within):
        return Proposal(name=chosen.name, reason=f"nothing distinguishes the {len(within)} checkpoints"
                        f"{' within bounds' if bounded else ''}: their likeness to the {like} pictures differs by no "
                        f"more than {ERRORS:g} standard errors; it is the earliest")
    mean, most = (float(each.likeness.decisive_P.mean()) for each in (chosen, best))
    if chosen is best:
        return Proposal(name=chosen.name, reason=f"its pictures resemble the {like} pictures most ({mean:.4f})")
    return Proposal(name=chosen.name, reason=f"its pictures resemble the {like} pictures ({mean:.4f}) as well as those "
                    f"of {best.name} ({most:.4f}), within {ERRORS:g} standard errors, and it is earlier")


def _better(one: Candidate, other: Candidate) -> bool:
    """Whether `one` has the higher mean, by more than chance: paired, since both drew the same prompts and seeds."""
    differences = one.likeness.decisive_P - other.likeness.decisive_P
    if len(differences) < 2:
        return False  # one picture says nothing
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return float(differences.mean()) > ERRORS * error


def _set_of(candidate: Candidate) -> str:
    return "training" if candidate.likeness.held_out_P is None else "held-out"


def _numbers(start: int, end: int) -> Integers:
    return np.arange(start, end, dtype=np.int64)
