"""Finds captions that do not fit their pictures, by embeddings of both in one space, as SigLIP's or CLIP's.

A caption is compared with its own picture and with random others. Only their order counts, as in retrieval (Radford et
al. 2021): how near a text is to its picture differs between models, and between long and short texts. Some pictures are
nearer to any text than others (hubs: Radovanović et al., JMLR 2010), so each one's mean cosine with all captions counts
as 0.
"""

from __future__ import annotations

import numpy as np

from prep.digest import digest_bytes
from prep.similarity.vectors import Doubles, Vectors, blocks_of

OTHERS = 1024  # random pictures that a caption is compared with
FEWEST = 20  # of them that have another caption; with fewer, an order says nothing


def nearer_parts(pictures: Vectors, texts: Vectors) -> Doubles:
    """[N]: the part of random other pictures that are as near to a caption as its own picture, or nearer; NaN for one
    that cannot be compared.

    `texts` [N, D] has the caption of each picture. Pictures with the same caption are not compared: it is theirs, too.
    """
    digests = [digest_bytes(row.tobytes()) for part in blocks_of(np.arange(len(texts))) for row in texts.of(part)]
    _, own = np.unique(digests, return_inverse=True)
    sample = pictures.by_content()[:OTHERS]
    columns, lengths = pictures.of(sample).astype(np.float64).T, pictures.lengths[sample]
    means = _mean_products(pictures, texts)
    found = np.full(len(texts), np.nan)
    for part in blocks_of(np.arange(len(texts))):
        captions = texts.of(part).astype(np.float64)
        mine = np.einsum("ij,ij->i", captions, pictures.of(part).astype(np.float64)) / pictures.lengths[part]
        mine -= means[part]
        others = own[part, None] != own[None, sample]
        nearer = (captions @ columns / lengths - means[sample] >= mine[:, None]) & others
        counts = others.sum(axis=1)
        found[part] = np.where(counts >= FEWEST, nearer.sum(axis=1) / np.maximum(counts, 1), np.nan)
    return found


def _mean_products(pictures: Vectors, texts: Vectors) -> Doubles:
    """[N]: of each picture, of length 1, the mean product with all captions. Their mean's direction is rounded to
    float16, so that products with it are exact."""
    every = np.arange(len(texts))
    mean = sum((texts.of(part).sum(axis=0, dtype=np.float64) for part in blocks_of(every)),
               start=np.zeros(texts.rows.shape[1])) / max(len(texts), 1)
    length = float(np.sqrt(np.square(mean).sum()))
    direction = (mean / max(length, 1e-12)).astype(np.float16).astype(np.float64)
    products = [pictures.of(part).astype(np.float64) @ direction for part in blocks_of(every)]
    means: Doubles = np.concatenate([np.zeros(0), *products]) * length / pictures.lengths
    return means
