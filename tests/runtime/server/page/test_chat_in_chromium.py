"""The chat in a browser: answers come as they are made, from the adapters that were chosen."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.chromium import Tab
from support.page_in_browser import Page
from support.served_engines import MakeGated, Spoken
from support.web_server import CHATS, COMPLETIONS, Web, web_server

QUESTION = "w5 w6 w7"
MOST = 8
LOG, ANSWER, TOLD = ".log", ".answer .text", ".answer .soft"


def expected(web: Web, **body: Any) -> str:
    """What the server answers to the same question without the page."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "temperature": 0, "max_tokens": MOST, **body}
    text: str = web.answer(CHATS, **body)["choices"][0]["message"]["content"]
    return text


def ask(page: Page, prompt: str = QUESTION) -> None:
    """Send a prompt, and wait for all answers."""
    page.fill("[name=max_tokens]", str(MOST))
    page.send(prompt)
    assert page.shows(lambda: page.count(".question") and page.is_idle())


def test_an_answer_is_shown_as_it_comes_and_can_be_stopped(make_gated: MakeGated, tab: Tab) -> None:
    gated = make_gated()
    whole = gated.web.answer(
        CHATS, messages=[{"role": "user", "content": QUESTION}], temperature=0, model="1"
    )["choices"][0]["message"]["content"]
    page = Page(tab, gated.web).open()
    page.choose(0, "1")
    gated.engine.shut()
    page.send(QUESTION)
    assert page.shows(lambda: gated.engine.waits)
    assert page.texts(ANSWER) == [""]
    assert page.text(TOLD) == "waits for its first token"
    gated.engine.let(3)
    assert page.shows(lambda: page.text(ANSWER))
    assert page.shows(lambda: gated.engine.waits)
    part = page.text(ANSWER)
    assert whole.startswith(part)
    assert part != whole
    assert not page.is_idle()
    assert tab.evaluate("document.querySelector('.log').ariaBusy") == "true"
    gated.engine.let()
    assert page.shows(page.is_idle)
    assert page.text(ANSWER) == whole
    assert page.text(TOLD).endswith("; length")
    assert f"{len(whole.split())} tokens, the first after " in page.text(TOLD)
    page.click("#clear")
    gated.engine.shut()
    page.send(QUESTION)
    assert page.shows(lambda: gated.web.load == 1)
    tab.press("Escape")
    assert page.shows(page.is_idle)
    assert page.text(TOLD) == "stopped without text"
    gated.engine.let()
    assert page.shows(lambda: gated.web.load == 0)


def test_a_conversation_goes_on_from_what_was_said_until_a_new_one(page: Page) -> None:
    page.choose(0, "a")
    ask(page)
    answer = page.text(ANSWER)
    ask(page, "w9")
    page.click("#clear")
    assert page.text(LOG) == ""
    ask(page, "w9")
    told = [body["messages"] for body in page.bodies(CHATS)]
    question = {"role": "user", "content": QUESTION}
    new = {"role": "user", "content": "w9"}
    assert told == [[question], [question, {"role": "assistant", "content": answer}, new], [new]]


def test_two_adapters_answer_one_prompt_side_by_side(page: Page, web: Web) -> None:
    page.click("[name=compare]")
    page.choose(0, "a")
    page.choose(1, "b")
    ask(page)
    assert page.texts(ANSWER) == [expected(web, model="a"), expected(web, model="b")]
    assert len(set(page.texts(ANSWER))) == 2
    assert page.texts(".who") == ["a", "b"]
    assert {body["model"] for body in page.bodies(CHATS)} == {"a", "b"}
    lefts = page.tab.evaluate(
        "[...document.querySelectorAll('.log')].map(e => e.getBoundingClientRect().left)"
    )
    assert lefts[1] > lefts[0] + 300
    page.click("[name=compare]")
    ask(page)
    assert len(page.bodies(CHATS)) == 3


def test_the_sliders_are_the_strength_of_an_adapter_and_of_a_blend(page: Page, web: Web) -> None:
    page.choose(0, "a")
    page.focus("input[type=range]")
    page.tab.press("ArrowLeft")
    page.tab.press("ArrowLeft")
    ask(page)
    page.click(".add")
    assert page.tab.evaluate("document.activeElement.tagName") == "SELECT"
    page.choose(1, "b")
    page.click("#clear")
    ask(page)
    page.click(".remove", 1)
    page.tab.evaluate("document.querySelector('input[type=range]').value = 1")
    page.click("#clear")
    ask(page)
    strength, blend, plain = page.bodies(CHATS)
    a, b = {"name": "a", "scale": 0.9}, {"name": "b", "scale": 1}
    assert (strength["model"], strength["lora"]) == ("base", [a])
    assert (blend["model"], blend["lora"]) == ("base", [a, b])
    assert plain["model"] == "a"
    assert "lora" not in plain
    assert page.text(ANSWER) == expected(web, model="a")


def test_the_strength_is_beside_its_slider_and_the_base_model_has_none(page: Page) -> None:
    slider = "document.querySelector('input[type=range]')"
    assert page.tab.evaluate(f"{slider}.disabled")
    assert page.text(".part .value") == ""
    page.choose(0, "a")
    page.focus("input[type=range]")
    page.tab.press("ArrowLeft")
    assert page.text(".part .value") == "0.95"


def test_what_is_left_empty_is_the_servers_to_choose(page: Page) -> None:
    page.fill("[name=seed]", "7")
    page.tab.evaluate("document.querySelector('[name=temperature]').value = ''")
    ask(page)
    (body,) = page.bodies(CHATS)
    assert (body["seed"], body["max_tokens"], body["stream"]) == (7, MOST, True)
    assert "temperature" not in body


def test_a_refusal_is_shown_in_the_servers_words_and_the_next_prompt_is_none_of_it(
    page: Page,
) -> None:
    page.choose(0, "a")
    page.click(".add")
    page.choose(1, "a")
    ask(page)
    assert page.text(".log .error") == "lora has 'a': it is there twice, or a base"
    page.click(".remove", 1)
    ask(page)
    assert [len(body["messages"]) for body in page.bodies(CHATS)] == [1, 1]
    assert page.texts(ANSWER)[1]


def test_without_a_chat_template_a_prompt_is_gone_on_from(spoken: Spoken, tab: Tab) -> None:
    engine = spoken.engine.with_name("without_template")
    shutil.copytree(spoken.engine, engine, dirs_exist_ok=True)
    (engine / "chat_template.jinja").unlink()
    with web_server(Spoken(engine, spoken.adapters).config()) as web:
        page = Page(tab, web).open()
        assert page.shows(lambda: page.count("#no-template"))
        ask(page)
        body = {"prompt": QUESTION, "temperature": 0, "max_tokens": MOST}
        assert page.text(ANSWER) == web.answer(COMPLETIONS, **body)["choices"][0]["text"]
        (sent,) = page.bodies(COMPLETIONS)
        assert sent["prompt"] == QUESTION
        assert page.bodies(CHATS) == []


def test_shift_and_enter_begin_a_line(page: Page) -> None:
    page.fill("#prompt", "w1")
    page.tab.press("Enter", "\r", modifiers=8)
    page.tab.write("w2")
    page.tab.press("Enter", "\r")
    assert page.shows(lambda: page.texts(".question") == ["w1\nw2"])


@pytest.fixture
def hostile(spoken: Spoken) -> Path:
    """An engine whose every word is HTML."""
    engine = spoken.engine.with_name("hostile")
    shutil.copytree(spoken.engine, engine, dirs_exist_ok=True)
    path = engine / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {f"<img/src=x>{word}": n for word, n in words.items()}
    tokenizer["model"]["unk_token"] = f"<img/src=x>{tokenizer['model']['unk_token']}"
    path.write_text(json.dumps(tokenizer))
    return engine


def test_hostile_names_prompts_answers_and_errors_are_text(
    hostile: Path, spoken: Spoken, tab: Tab
) -> None:
    name = "</option><img src=x onerror=alert(1)>\"'&lt;"
    modules = [(name, str(spoken.adapters["a"]))]
    served = Spoken(hostile, spoken.adapters)
    with web_server(served.config(names=["<b>base</b>"], lora_modules=modules)) as web:
        page = Page(tab, web).open()
        page.choose(0, name)
        ask(page, f"<img src=x onerror=alert(2)> {name}")
        assert page.text(".question") == f"<img src=x onerror=alert(2)> {name}"
        assert page.text(".who") == name
        assert page.text(ANSWER).count("<img/src=x>w") == MOST
        assert page.text("#adapter-rows th") == name
        assert page.text("#served") == "<b>base</b>"
        page.click(".add")
        page.choose(1, name)
        ask(page)
        assert f"lora has {name!r}"[:30] in page.text(".log .error")
        page.fill("[name=lora_name]", "<img src=x onerror=alert(3)>")
        page.fill("[name=lora_path]", "<script>")
        page.click("#load button")
        assert page.shows(lambda: "<img src=x" in page.text("#changed"))
        assert page.tab.evaluate("document.querySelectorAll('img, b, script').length") == 1
        assert page.complaints() == []
        assert page.tab.happened("Page.javascriptDialogOpening") == []
