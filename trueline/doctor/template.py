"""Checks of a tokenizer and its chat template: how a conversation begins, changes turns and ends."""

from collections.abc import Callable, Iterable, Iterator

from trueline.config.rl import RLConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Message
from trueline.doctor.case import LOOKED_AT, Case, Check
from trueline.doctor.data import share
from trueline.models.loading import generation_ends, load_settings
from trueline.monitoring.findings import BAD, FINE, WATCH, Finding

TEMPLATE, MODEL = "data.chat_template", "model.path"
ASKED: list[Message] = [{"role": "user", "content": "a"}]


def no_template(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    if not chat.templated:
        what = "no chat template: messages are joined by line breaks, without roles"
        yield Finding(WATCH, "no_chat_template", what, "a chat model expects the marks of its template", TEMPLATE)


def rewritten_turns(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    if chat.templated and (kind := chat.rewrites()):
        several = isinstance(case.config, RLConfig) and bool(case.config.environment.kind())
        level = WATCH if several or kind == "all of them" else FINE
        what = f"the template rewrites earlier turns ({kind})"
        why = "each turn of a conversation becomes a training sequence of its own"
        yield Finding(level, "template_rewrites_turns", what, why, TEMPLATE)


def unended_turns(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    if not chat.templated:
        return
    before, behind = chat.around_reply()
    if not chat.stop_ids & set(behind):
        written, ends = chat.tokenizer.decode(behind), chat.tokenizer.convert_ids_to_tokens(sorted(chat.stop_ids))
        what = f"the template ends a reply with {written!r:.40}, which has no stop token ({', '.join(ends)})"
        level = WATCH if isinstance(case.config, SupervisedConfig) else BAD
        why = "a model that follows it only stops at the length limit"
        yield Finding(level, "template_without_stop", what, why, TEMPLATE)
    if before.strip():
        what = f"the template has no generation prompt: {before!r:.40} is between a prompt and its reply"
        why = "the model would have to write it, and be rewarded for it"
        yield Finding(BAD, "no_generation_prompt", what, why, TEMPLATE)


def end_tokens(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    """Compare the end tokens of the tokenizer, config.json and generation_config.json."""
    own, settings = chat.tokenizer.eos_token_id, load_settings(case.model).get("eos_token_id")
    configured = settings if isinstance(settings, list) else [settings] * (settings is not None)
    named = {"config.json": configured, "generation_config.json": generation_ends(case.model)}
    if other := {file: ends for file, ends in named.items() if ends and own not in ends}:
        files = ", ".join(f"{file} with {'or '.join(map(str, ends))}" for file, ends in other.items())
        what = f"end tokens disagree: the tokenizer ends with {own} ({chat.tokenizer.eos_token}), {files}"
        yield Finding(WATCH, "end_tokens", what, "programs stop at different tokens", MODEL)


def padding(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    tokenizer = chat.tokenizer
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        why = "harmless here, but programs that mask padding teach the exported model never to end"
        yield Finding(WATCH, "pad_token", f"pad and end token are the same: {tokenizer.eos_token}", why, MODEL)


def vocabulary(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    known, words = case.facts.vocabulary if case.facts else None, len(chat.tokenizer)
    if known is not None and words > known:
        what = f"the tokenizer has {words} tokens, the model {known} embeddings"
        yield Finding(BAD, "vocabulary", what, "a token without an embedding ends the run with an index error", MODEL)


def doubled_start(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    """Find a doubled first token, here or in programs that tokenize a rendered prompt."""
    start = chat.tokenizer.bos_token_id
    rendered = [chat.prompt_tokens(row.asked, row.tools) for row in case.rows[:LOOKED_AT] if row.asked]
    doubled = sum(tokens[:2] == [start, start] for tokens in rendered if start is not None)
    added = start is not None and chat.tokenizer("a")["input_ids"][:1] == [start]
    if doubled:
        what = f"{share(doubled, len(rendered))} checked begin with {chat.tokenizer.bos_token} twice"
        why = "the model has never seen that: template, tokenizer and data add one each"
        yield Finding(BAD, "doubled_bos", what, why, TEMPLATE)
    elif added and chat.templated and chat.prompt_tokens(ASKED)[:1] == [start]:
        what = f"template and tokenizer both put {chat.tokenizer.bos_token} in front (BOS)"
        why = "not doubled here, but in programs that tokenize the rendered text in the usual way"
        yield Finding(WATCH, "doubled_bos", what, why, TEMPLATE)


def rendered_rows(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    """Find texts with special tokens, which a template would render again."""
    special = [word for word in chat.tokenizer.all_special_tokens if len(word) > 2]
    rows = case.rows[:LOOKED_AT]
    marked = [(row, word) for row in rows for word in special if word in row.text()]
    if marked and chat.templated:
        row, word = marked[0]
        level = BAD if len({id(one) for one, _ in marked}) > len(rows) / 2 else WATCH
        what = f"prompts contain special tokens, e.g. {word} in {row.place}: they look rendered already"
        yield Finding(level, "rendered_rows", what, "the template would render them again: set never", TEMPLATE)


def with_chat(check: Callable[[Case, ChatFormat], Iterable[Finding]]) -> Check:
    """Skip a check where there is no tokenizer."""
    return lambda case: check(case, case.chat) if case.chat is not None else ()


TURNS, TOKENS = (no_template, rewritten_turns, unended_turns), (end_tokens, padding, vocabulary, doubled_start)
CHECKS = tuple(map(with_chat, (*TURNS, *TOKENS, rendered_rows)))
