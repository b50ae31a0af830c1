"""A conversation in a terminal: answers as they come, adapters between turns, Ctrl-C, Ctrl-D."""

from pathlib import Path

from conftest import TinyEngine
from support.spoken_engine import spoken_engine
from support.terminal import ended, interrupt_at_prompt, shown, terminal

from trt_lora.runtime import SamplingParams, open_engine

QUESTION = "w5 w6 w7"
MORE_THAN_A_TERMINAL_HOLDS = 4000  # characters a word, of 60 words: Linux keeps 64 KiB unread


def answers(engine: Path, adapter: Path) -> tuple[str, str]:
    """The Python interface's answers of the base model and of the adapter."""
    sampling = SamplingParams(max_tokens=6, temperature=0)
    with open_engine(engine, "onnxruntime") as opened:
        opened.adapters.load("a", adapter)
        base = opened.generate(QUESTION, sampling=sampling)
        adapted = opened.generate(QUESTION, adapter="a", sampling=sampling)
    return base.text, adapted.text


def test_a_conversation_in_which_adapters_are_switched(
    spoken: Path, tiny_engine: TinyEngine
) -> None:
    base, adapted = answers(spoken, tiny_engine.adapter)
    assert base != adapted
    options = ["--adapter", f"a={tiny_engine.adapter}", "--use", "base", "--max-tokens", "6"]
    with terminal("trt-lora", "chat", spoken, *options) as chat:
        assert shown(chat, "(base)> ") == "type /help for commands, Ctrl-D to end\n"
        chat.sendline(QUESTION)
        assert shown(chat, "(base)> ") == f"{QUESTION}\n{base}\n"
        chat.sendline("/new")
        shown(chat, "(base)> ")
        chat.sendline("/use a")
        assert shown(chat, "a> ") == "/use a\n"
        chat.sendline(QUESTION)
        assert shown(chat, "a> ") == f"{QUESTION}\n{adapted}\n"
        chat.sendline("/adapters")
        assert shown(chat, "a> ") == "/adapters\n  (base)\n* a\n"
        chat.sendline("/use b")
        assert "error: unknown adapter 'b'" in shown(chat, "a> ")
        chat.sendline("/quit")
        assert ended(chat) == ("/quit\n", 0)


def test_an_answer_is_shown_as_it_comes_ctrl_c_ends_it_and_ctrl_d_the_conversation(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    engine = spoken_engine(
        tiny_engine.engine, tmp_path / "engine", word_length=MORE_THAN_A_TERMINAL_HOLDS
    )
    with terminal("trt-lora", "chat", engine, "--max-tokens", "60") as chat:
        shown(chat, "(base)> ")
        chat.sendline("hello")
        shown(chat, "hello\r\n")
        shown(chat, "...")  # the first word is here, and the last one cannot be: nobody reads
        chat.sendintr()
        shown(chat, "(base)> ")
        chat.sendline("/adapters")
        assert shown(chat, "(base)> ") == "/adapters\n* (base)\n"
        chat.sendeof()
        assert ended(chat) == ("\n", 0)


UP, LEFT, TAB = "\x1b[A", "\x1b[D", "\t"


def test_an_earlier_line_comes_back_and_a_line_can_be_edited(
    spoken: Path, tiny_engine: TinyEngine
) -> None:
    base, _ = answers(spoken, tiny_engine.adapter)
    with terminal("trt-lora", "chat", spoken, "--max-tokens", "6") as chat:
        shown(chat, "(base)> ")
        chat.sendline(QUESTION)
        shown(chat, f"{base}\r\n(base)> ")
        chat.sendline("/new")
        shown(chat, "(base)> ")
        chat.sendline(UP + UP)
        shown(chat, f"{base}\r\n(base)> ")
        chat.sendline("/ad" + "apers" + LEFT * 3 + "t")  # the letter that is missing in the middle
        shown(chat, "* (base)\r\n(base)> ")
        chat.sendeof()
        assert ended(chat) == ("\n", 0)


def test_tab_completes_commands_and_the_names_of_adapters(
    spoken: Path, tiny_engine: TinyEngine
) -> None:
    given = ["--adapter", f"pirate={tiny_engine.adapter}", "--use", "base"]
    with terminal("trt-lora", "chat", spoken, *given) as chat:
        shown(chat, "(base)> ")
        chat.sendline(f"/u{TAB}pi{TAB}")
        shown(chat, "\r\npirate> ")
        chat.sendline(f"/bl{TAB}pi{TAB}0.5")
        shown(chat, "\r\nblend> ")
        chat.sendline("/quit")
        assert ended(chat)[1] == 0


def test_ctrl_c_at_the_prompt_gives_a_fresh_one_and_ends_the_talk_when_it_comes_twice(
    spoken: Path,
) -> None:
    with terminal("trt-lora", "chat", spoken, "--max-tokens", "6") as chat:
        shown(chat, "(base)> ")
        chat.send("half a li")
        shown(chat, "half a li")
        interrupt_at_prompt(chat)
        assert "Ctrl-C again, or Ctrl-D, ends" in shown(chat, "(base)> ")
        chat.sendline("/adapters")
        shown(chat, "* (base)\r\n(base)> ")
        interrupt_at_prompt(chat)
        shown(chat, "(base)> ")
        interrupt_at_prompt(chat)
        rest, status = ended(chat)
        assert status == 0
        assert "error" not in rest
