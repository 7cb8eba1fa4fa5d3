"""Chat templates: what transformers renders, and limits for templates that would not end."""

import functools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.models import chat_rendering
from jaxshare.models.chat_rendering import ChatTemplateError, SlowTemplateError, render
from jaxshare.serving import chat_template
from tests.serving.test_words import said, tokenizer

FEATURES = (
    "{%- set seen = namespace(n=0) -%}\n"
    "{%- macro turn(m) -%}{{ m.role | capitalize }}: {{ m.content | tojson(indent=1) }}{%- endmacro -%}\n"
    "{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}\n"
    "  {%- set seen.n = seen.n + 1 -%}{{ turn(m) }} {{ loop.index }} {{ m.items() | list }}\n"
    "  {%- generation %}{{ m.content | length }}{% endgeneration %}\n"
    "{%- endfor -%}{{ seen.n }} {{ strftime_now('%Y') }} {{ dict(a=1) | tojson }}{{ tools is none }}\n"
    "{% if add_generation_prompt %}<assistant>{{ bos_token }}{{ eos_token }}{% endif %}\n"
)
# Each would go on for ever, or take all memory, in its own way.
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = {
    "range": "{{ range(10**9) | list }}",
    "text": "{{ 'x' * 20000000000 }}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "length": "x" * (2**20 + 1),
    "nesting": "{{ " + "(" * 5000,
    "padding": "{{ 'x'.ljust(10**11) }}",
}


def one(text: str = "a") -> list[dict[str, str]]:
    return said(text)


def test_templates_see_what_transformers_gives_them():
    messages = said("Be <b>brief</b> & 'good'.", "1 < 2?\n", 'Ä "yes" ☃')
    made = tokenizer(FEATURES)
    assert chat_template.render_with(made, messages) == made.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


@given(st.text("{}%-# \n'|~+*()[]abmfori0.=", max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_template_is_rendered_as_transformers_does_or_refused(text):
    """The process is the same afterwards."""
    made = tokenizer("x")
    made.chat_template = text
    try:
        rendered = render(text, one(), made.special_tokens_map)
    except ChatTemplateError:
        with pytest.raises(Exception):  # noqa: B017, of many types
            made.apply_chat_template(one(), tokenize=False, chat_template=text or None)
    else:
        assert rendered == made.apply_chat_template(
            one(), tokenize=False, add_generation_prompt=True, chat_template=text
        )


@pytest.mark.parametrize("kind", GREEDY)
def test_a_template_that_takes_too_much_is_refused_and_the_next_one_runs(kind):
    with pytest.raises(ChatTemplateError, match=r"more than|too often|MAX_RANGE|expected"):
        render(GREEDY[kind], one(), {})
    assert render("{{ messages[0].content }}", one("b"), {}) == "b"


def test_a_template_that_never_ends_is_refused_in_time(monkeypatch):
    monkeypatch.setattr(chat_rendering, "RENDER_SECONDS", 0.3)
    with pytest.raises(SlowTemplateError, match="takes more than"):
        render(ENDLESS, one(), {})
    monkeypatch.undo()
    assert render("{{ messages[0].content }}", one("b"), {}) == "b"


def test_threads_get_their_own_answers():
    texts = [str(i) * 100 for i in range(32)]
    answers: dict[str, str] = {}

    def ask(text: str) -> None:
        answers[text] = render("{{ messages[0].content }}", one(text), {})

    threads = [threading.Thread(target=functools.partial(ask, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {text: text for text in texts}


def test_a_process_that_has_died_is_replaced():
    render("a", one(), {})
    process = chat_rendering._renderer()._process
    process.kill()
    process.wait()
    assert render("a", one(), {}) == "a"
