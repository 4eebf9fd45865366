"""Chat templates are rendered in a worker, as transformers renders them, and depend on the messages alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pipelines import save

from prep.errors import ModelError
from prep.models.families.registry import FAMILIES
from prep.models.fingerprint import text_files
from prep.models.text import chat
from prep.models.text.pipeline import tokenizers_of
from prep.workers.pool import WorkerPool
from prep.workers.service import Limits

CHATS = [[{"role": "user", "content": "a red <cat> "}],
         [{"role": "system", "content": "say"}, {"role": "user", "content": "é {{ x }} {% y"}]]
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m.content }}\n{% endfor %}"
SAME = {
    "plain": PLAIN,
    "system": "{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% else %}none{%- endif %}|",
    "prompt": PLAIN + "{% if add_generation_prompt %}<go>{% endif %}{{ enable_thinking is defined }}{{ eos_token }}",
    "namespace": "{% set ns = namespace(last=-1, by='x') %}{% for m in messages %}{% set ns.last = loop.index0 %}"
                 "{% endfor %}{{ ns.last }}{{ ns.by }}",
    "filters": "{{ messages | map(attribute='role') | list }}{{ messages | selectattr('role', 'equalto', 'user') "
               "| list | length }}{{ messages | map(attribute='content') | join('+') | upper }}"
               "{{ [3, 1] | sort | reverse | first }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ {'a': 1} | items | list }}",
    "methods": "{{ messages[0].content.strip().split(' ')[-1] }}{{ messages[0].items() | list }}{{ 'a%s' % 3 }}"
               "{{ '{:>4}'.format(7) }}{{ messages[::-1][0].get('role', 'no') }}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{% break %}"
             "{% endfor %}{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "macro": "{% macro say(x) %}[{{ x }}{{ caller() if caller }}]{% endmacro %}{{ say(3) }}"
             "{% call say(1) %}in{% endcall %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}"
                  "{% endfor %}",
    "clock": "{% set today = strftime_now('%Y-%m-%d') %}" + PLAIN,
    "dict": "{% set d = dict(a=1) %}{{ d.a }}{{ tools is none }}{{ documents }}{{ missing }}",
}


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(chat.SERVICE) as made:
        yield made


def question(template, messages=CHATS[0], **values):
    return template, {"tools": None, "documents": None, "messages": messages, **values}


@pytest.mark.parametrize("name", SAME)
def test_as_transformers_renders_it(pool, name):
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in CHATS:
        for values in ({"add_generation_prompt": False}, {"add_generation_prompt": True, "eos_token": "</s>",
                                                          "enable_thinking": True}):
            (wanted,), _ = render_jinja_template([messages], chat_template=SAME[name], **values)
            assert chat.render(pool, *question(SAME[name], messages, **values), Path("tokenizer")) == wanted


@pytest.mark.parametrize("template", [
    "{{ strftime_now('%H') }}", "{% if strftime_now('%Y') > '2010' %}a{% endif %}", "{{ [1, 2] | random }}",
    "{{ lipsum() }}", "{{ cycler(1).next() }}", "{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}", "{% set n = namespace(__class__=1) %}", "{{ raise_exception('roles must alternate') }}",
    "{{ 1 // 0 }}", "{% for", "{{ namespace.__init__.__globals__ }}", "{{ range._call.x }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 'a' * 2000000 }}"])
def test_what_depends_on_more_than_messages_or_fails_is_refused(pool, template):
    with pytest.raises(ModelError, match=r"the chat template in tokenizer cannot be rendered: .+") as error:
        chat.render(pool, *question(template), Path("tokenizer"))
    assert error.value.hint == chat.HINT


@pytest.mark.parametrize(("template", "said"), [
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.5 seconds"),
    ("{% set x = 'a' * 3000000000 %}{{ x }}", "more than 1.0 GiB of memory")])
def test_a_template_without_end_is_refused(pool, monkeypatch, template, said):
    monkeypatch.setattr(chat, "LIMITS", Limits(seconds=0.5 if "seconds" in said else 20, memory=1 << 30))
    with pytest.raises(ModelError, match=f"cannot be rendered within its limits: {said}"):
        chat.render(pool, *question(template), Path("tokenizer"))


def test_no_address_of_a_process_gets_into_the_text(tmp_path):
    shown = " ".join("{{ " + one + " }}" for one in (
        "range", "dict", "namespace", "namespace(a=range)", "messages.append", "messages[0]['items']", "'a'.join",
        "messages | map('upper')", "[2, 1] | reverse", "messages | select", "strftime_now", "raise_exception", "self",
        "messages | batch(2)", "messages[0] | items", "messages | attr('append')", "self.block", "[range] | string",
        "'%s' % messages.append", "messages.append ~ ''", "messages | groupby('role')", "'a'.format"))
    template, values = question("{% block block %}{% endblock %}" + shown)
    asked = template, json.dumps(values)
    code = f"from prep.models.text import chat; print(*chat._rendered({asked!r}))"
    texts = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={
        **os.environ, "PYTHONHASHSEED": str(seed), "PYTHONMALLOC": "debug" if seed else "default"}).stdout
        for seed in range(2)}
    (text,) = texts
    assert "at 0x" not in text and text.count("<function>") > 8, text


@pytest.mark.parametrize("name", ["zimage", "ovis", "flux2", "flux2_klein", "flux3"])
def test_pipelines_get_the_same_tokens(tmp_path, name):
    """As from the tokenizer's own class, whatever they ask for."""
    save(name, tmp_path)
    tokenizer = tokenizers_of(tmp_path, FAMILIES[name], text_files(tmp_path))["tokenizer"]
    own = type(tokenizer).__mro__[1].apply_chat_template
    texts = [[{"role": "user", "content": [{"type": "text", "text": one}] if name == "flux2" else one}]
             for one in ("a cat", " two  dogs ", "")]
    for options in ({"tokenize": False, "add_generation_prompt": True, "enable_thinking": True},
                    {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False},
                    {"tokenize": True, "return_dict": True, "return_tensors": "pt", "padding": "max_length",
                     "truncation": True, "max_length": 40}):
        for conversation in (texts[1], texts):
            assert str(tokenizer.apply_chat_template(conversation, **options)) == str(own(
                tokenizer, conversation, **options))
