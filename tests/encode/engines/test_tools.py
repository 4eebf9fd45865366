"""The encoder that a worker keeps from one block of tasks to the next, and what it holds meanwhile."""

from __future__ import annotations

from contextlib import contextmanager

from prep.encode.engines.tools import Tools


def test_what_an_encoder_holds_lasts_as_long_as_the_encoder():
    told = []

    @contextmanager
    def held():
        told.append("held")
        yield
        told.append("let go")

    with Tools(1) as tools:
        def load():
            tools.hold(held())
            return object()

        first = tools.encoder("latent", load)
        assert tools.encoder("latent", load) is first and told == ["held"]
        tools.encoder("text", object)
        assert told == ["held", "let go"]
        assert tools.encoder("latent", load) is not first and told == ["held", "let go", "held"]
    assert told == ["held", "let go"] * 2
