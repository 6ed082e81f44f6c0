"""Checks of a tokenizer and its chat template: how a conversation begins, turns over and ends."""

from collections.abc import Callable, Iterable, Iterator

from trueline.config.rl import RLConfig
from trueline.config.supervised import SupervisedConfig
from trueline.data.chat import ChatFormat
from trueline.data.messages import Message
from trueline.doctor.case import Case, Check
from trueline.doctor.findings import Finding, share
from trueline.models.loading import generation_ends, load_settings

LOOKED_AT = 200  # rows
TEMPLATE, MODEL = "data.chat_template", "model.path"
ASKED: list[Message] = [{"role": "user", "content": "a"}]


def no_template(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    if not chat.templated:
        what = "no chat template is used: messages are joined by line breaks, without roles"
        yield Finding("watch", what, "a model that was trained on chats expects its marks", TEMPLATE)


def rewritten_turns(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    if chat.templated and (kind := chat.rewrites()):
        several = isinstance(case.config, RLConfig) and bool(case.config.environment.kind())
        why = "each turn of a conversation becomes a training sequence of its own"
        level = "watch" if several or kind == "all of them" else "fine"
        yield Finding(level, f"the template rewrites earlier turns ({kind})", why, TEMPLATE)


def unended_turns(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    if not chat.templated:
        return
    before, behind = chat.around_reply()
    ends = chat.tokenizer.convert_ids_to_tokens(sorted(chat.stop_ids))
    if not chat.stop_ids & set(behind):
        written = chat.tokenizer.decode(behind)
        what = f"the template ends a reply with {written!r:.40}, which holds no stop token ({', '.join(ends)})"
        level = "watch" if isinstance(case.config, SupervisedConfig) else "bad"
        yield Finding(level, what, "a model that follows it never stops before the length limit", TEMPLATE)
    if before.strip():
        what = f"the template has no generation prompt: {before!r:.40} stands between a prompt and its reply"
        yield Finding("bad", what, "the model would have to write it, and be rewarded for it", TEMPLATE)


def end_tokens(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    """Compare the end tokens of the tokenizer, config.json and generation_config.json."""
    own, settings = chat.tokenizer.eos_token_id, load_settings(case.model).get("eos_token_id")
    named = {
        "config.json": settings if isinstance(settings, list) else [settings] * (settings is not None),
        "generation_config.json": generation_ends(case.model),
    }
    other = {file: ends for file, ends in named.items() if ends and own not in ends}
    if other:
        files = ", ".join(f"{file} with {'or '.join(map(str, ends))}" for file, ends in other.items())
        what = f"end tokens disagree: the tokenizer ends with {own} ({chat.tokenizer.eos_token}), {files}"
        yield Finding("watch", what, "programs that read one of them stop where others go on", MODEL)


def padding(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    tokenizer = chat.tokenizer
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        why = "nothing here masks by it, but programs that mask padding teach the exported model never to end"
        yield Finding("watch", f"pad and end token are the same: {tokenizer.eos_token}", why, MODEL)


def vocabulary(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    known, words = case.facts.vocabulary if case.facts else None, len(chat.tokenizer)
    if known is not None and words > known:
        what = f"the tokenizer has {words} tokens, the model {known} embeddings"
        yield Finding("bad", what, "a token without an embedding ends the run with an index error", MODEL)


def doubled_start(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    """Find a first token that stands there twice, here or for whoever tokenizes a rendered prompt."""
    start = chat.tokenizer.bos_token_id
    rendered = [chat.prompt_tokens(row.asked, row.tools) for row in case.rows[:LOOKED_AT] if row.asked]
    doubled = sum(tokens[:2] == [start, start] for tokens in rendered if start is not None)
    added = start is not None and chat.tokenizer("a")["input_ids"][:1] == [start]
    if doubled:
        what = f"{share(doubled, len(rendered))} looked at begin with {chat.tokenizer.bos_token} twice"
        yield Finding("bad", what, "the model has never seen that: template, tokenizer and data add one each", TEMPLATE)
    elif added and chat.templated and chat.prompt_tokens(ASKED)[:1] == [start]:
        what = f"template and tokenizer both put {chat.tokenizer.bos_token} in front (BOS)"
        why = "not doubled here, but by programs that tokenize the template's text in the usual way"
        yield Finding("watch", what, why, TEMPLATE)


def rendered_rows(case: Case, chat: ChatFormat) -> Iterator[Finding]:
    """Find texts with special tokens in them, which a template would render again."""
    special = [word for word in chat.tokenizer.all_special_tokens if len(word) > 2]
    rows = case.rows[:LOOKED_AT]
    marked = [(row, word) for row in rows for word in special if word in row.text()]
    if marked and chat.templated:
        row, word = marked[0]
        level = "bad" if len({id(one) for one, _ in marked}) > len(rows) / 2 else "watch"
        what = f"prompts hold special tokens, e.g. {word} in {row.place}: they look rendered already"
        yield Finding(level, what, "the template would render them once more: set never", TEMPLATE)


def with_chat(check: Callable[[Case, ChatFormat], Iterable[Finding]]) -> Check:
    """Make a check of any case of one that needs a tokenizer."""
    return lambda case: check(case, case.chat) if case.chat is not None else ()


WITH_CHAT = (
    no_template,
    rewritten_turns,
    unended_turns,
    end_tokens,
    padding,
    vocabulary,
    doubled_start,
    rendered_rows,
)
CHECKS = tuple(map(with_chat, WITH_CHAT))
