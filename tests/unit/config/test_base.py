from pathlib import Path

import pytest
from pydantic import Field

from trueline.config.base import POLICY, ROLES, Config, ConfigError, merge, parse_override, read_tree
from trueline.config.foreign_names import FOREIGN_NAMES
from trueline.config.rl import RLConfig
from trueline.config.supervised import SupervisedConfig
from trueline.verbs import TASK_VERBS, VERBS


class Engine(Config):
    power: int = Field(3, ge=1)
    """Power of the engine."""
    fuel: str | None = None
    """What it burns."""


class Car(Config):
    wheels: int = 4
    """Number of wheels."""
    speed: float = 1.0
    """How fast it goes."""
    engine: Engine = Engine()


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_later_files_win_and_overrides_win_over_files(tmp_path: Path) -> None:
    first = write(tmp_path, "first.yaml", "wheels: 6\nspeed: 2.0\nengine: {power: 5, fuel: coal}\n")
    second = write(tmp_path, "second.yaml", "speed: 3.0\nengine: {power: 7}\n")
    car = Car.load([first, second], ["engine.power=9"], base={"wheels": 8, "engine": {"fuel": "wood"}})
    assert (car.wheels, car.speed, car.engine.power, car.engine.fuel) == (6, 3.0, 9, "coal")


def test_base_gives_way_to_everything_and_is_left_alone() -> None:
    base = {"engine": {"power": 2}}
    assert Car.load([], ["engine.power=4"], base).engine.power == 4
    assert base == {"engine": {"power": 2}}


def test_merge_goes_into_nested_trees_and_changes_neither_argument() -> None:
    under, over = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}, {"a": {"c": {"f": 4}}, "e": {"g": 5}}
    assert merge(under, over) == {"a": {"b": 1, "c": {"d": 2, "f": 4}}, "e": {"g": 5}}
    assert under == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert over == {"a": {"c": {"f": 4}}, "e": {"g": 5}}


def test_merge_replaces_lists_as_a_whole() -> None:
    assert merge({"a": [1, 2]}, {"a": [3]}) == {"a": [3]}


NONSENSE = ["xyzzy", "foo", "bar", "banana", "my_key", "qwerty", "training.foo", "algorithm.unicorn", "zoo.bar.baz"]


def complaints(kind: type[Config], *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        kind.load([], list(overrides))
    return str(caught.value).splitlines()


def suggested(kind: type[Config], path: str) -> str:
    (line,) = complaints(kind, f"{path}=1")
    return line.removeprefix(f"unknown key {path!r}; did you mean ").removesuffix("?").strip("'")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("wheel", "wheels"),
        ("engine.powr", "engine.power"),
        ("power", "engine.power"),  # the right key in the wrong place
        ("engin.power", "engine.power"),
        ("sepde", "speed"),  # letters swapped
        ("engien", "engine"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(path: str, nearest: str) -> None:
    assert complaints(Car, f"{path}=3") == [f"unknown key {path!r}; did you mean {nearest!r}?"]


@pytest.mark.parametrize("kind", [Car, RLConfig, TASK_VERBS["sft"].kind, TASK_VERBS["dpo"].kind])
def test_an_unknown_key_without_a_neighbour_points_to_the_list_of_keys(kind: type[Config]) -> None:
    for path in NONSENSE:
        assert complaints(kind, f"{path}=1") == [f"unknown key {path!r}; `trueline config` lists every key"]


def test_the_policys_keys_are_proposed_before_those_of_other_models() -> None:
    roles = set(RLConfig().roles())
    assert set(ROLES) == roles
    sections: dict[str, set[str]] = {}
    for key in RLConfig().leaves():
        section, _, word = key.path.rpartition(".")
        sections.setdefault(word, set()).add(section)
    shared = {word for word, found in sections.items() if found & roles and found & set(POLICY)} - set(FOREIGN_NAMES)
    assert {"learning_rate", "micro_batch_tokens", "tensor_parallel", "path"} <= shared
    for word in shared:
        assert suggested(RLConfig, word).rpartition(".")[0] in POLICY, word
    assert suggested(RLConfig, "learning_rte") == "training.learning_rate"
    assert suggested(RLConfig, "rollout.micro_batch_tokens") == "training.micro_batch_tokens"
    assert suggested(VERBS["raft"].kind, "step") == "training.steps"  # reward.steps comes first in the tree


def test_the_section_that_was_meant_is_kept() -> None:
    assert suggested(RLConfig, "critic.learning_rte") == "critic.learning_rate"
    assert suggested(RLConfig, "critc.learning_rate") == "critic.learning_rate"
    assert suggested(RLConfig, "training.rank") == "training.ranks"  # though model.lora.rank has the very word
    assert suggested(RLConfig, "critic.lr") == "critic.learning_rate"


def test_every_key_of_an_unknown_section_is_told(tmp_path: Path) -> None:
    file = write(tmp_path, "car.yaml", "motor: {power: 3, a: {b: 1}, c: {}}\nwheels: 5\n")
    with pytest.raises(ConfigError) as caught:
        Car.load([file], [])
    lines = str(caught.value).splitlines()
    assert [line.split("'")[1] for line in lines] == ["motor.power", "motor.a.b", "motor.c"]
    assert "'engine.power'" in lines[0]


def test_every_mistake_is_told_at_once() -> None:
    assert {line.split()[0] for line in complaints(Car, "wheel=3", "engine.power=0")} == {"unknown", "engine.power:"}


def test_a_wrong_value_is_told_with_key_and_value() -> None:
    with pytest.raises(ConfigError, match=r"engine\.power: .*greater than or equal to 1 \(got 0\)"):
        Car.load([], ["engine.power=0"])
    with pytest.raises(ConfigError, match=r"wheels: .*integer.*\(got 'many'\)"):
        Car.load([], ["wheels=many"])


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1E-4", 1e-4), ("5e3", 5000.0), (".5", 0.5), ("3", 3.0)])
def test_floats_are_read_as_people_write_them(text: str, value: float, tmp_path: Path) -> None:
    assert Car.load([], [f"speed={text}"]).speed == value
    assert Car.load([write(tmp_path, "car.yaml", f"speed: {text}\n")], []).speed == value


@pytest.mark.parametrize("override", ["wheels", "=3", ""])
def test_what_is_no_override_is_refused_with_the_form(override: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_override(override)


def test_an_override_is_cut_at_its_first_equals_sign() -> None:
    assert parse_override("engine.fuel=a=b") == {"engine": {"fuel": "a=b"}}


def test_null_and_numbers_are_possible_values_of_a_text() -> None:
    assert Car.load([], ["engine.fuel=null"], {"engine": {"fuel": "coal"}}).engine.fuel is None
    assert Car.load([], ["engine.fuel=95"]).engine.fuel == "95"


@pytest.mark.parametrize("text", ["#### (\\d+)", "a #b", "Answer: yes", "[0-9]", "2024-01-01", "007", "on"])
def test_text_on_the_command_line_arrives_as_it_was_typed(text: str) -> None:
    assert Car.load([], [f"engine.fuel={text}"]).engine.fuel == text


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        read_tree(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not valid YAML"):
        read_tree(write(tmp_path, "broken.yaml", "a: [1\n"))
    with pytest.raises(ConfigError, match=r"list\.yaml: .*found list"):
        read_tree(write(tmp_path, "list.yaml", "- 1\n"))


def test_values_are_fixed_after_loading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Car().wheels = 3  # type: ignore[misc]


def test_replaced_is_checked_like_a_file() -> None:
    car = Car(wheels=3)
    changed = car.with_keys({"engine": {"power": 8}})
    assert (changed.wheels, changed.engine.power, car.engine.power) == (3, 8, 3)
    with pytest.raises(ConfigError, match=r"engine\.power"):
        car.with_keys({"engine": {"power": -1}})


KINDS = [RLConfig, SupervisedConfig, *dict.fromkeys(verb.kind for verb in TASK_VERBS.values())]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning_of_one_line(kind: type[Config]) -> None:
    keys = list(kind().leaves())
    assert len(keys) > 30
    assert [key.path for key in keys if not key.meaning.strip() or "\n" in key.meaning.strip()] == []
    assert len({key.path for key in keys}) == len(keys)


def test_leaves_are_paths_with_kind_and_value() -> None:
    keys = {key.path: key for key in Car.load([], ["engine.fuel=coal"]).leaves()}
    assert list(keys) == ["wheels", "speed", "engine.power", "engine.fuel"]
    assert (keys["engine.power"].kind, keys["engine.power"].default) == ("int", 3)
    assert (keys["engine.fuel"].kind, keys["engine.fuel"].default) == ("str | null", "coal")


def test_a_key_that_a_file_holds_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "car.yaml"
    file.write_text("wheels: 3\nengine:\n  power: 1\n  fuel: a\n\n  power: 2\n")
    with pytest.raises(ConfigError, match=r"car\.yaml: the key 'engine\.power' is in lines 3 and 6: delete one"):
        Car.load([file], [])
    file.write_text("a: &a {x: 1}\nb:\n  <<: *a\n  x: 2\n")  # a merge is no repetition
    assert read_tree(file)["b"] == {"x": 2}
    file.write_text("tools:\n- {name: a, name: b}\n")
    with pytest.raises(ConfigError, match=r"the key 'tools\.name' is twice in line 2"):
        read_tree(file)
    with pytest.raises(ConfigError, match=r"sets=\{a: 1, a: 2\}: the key 'a' is twice"):
        parse_override("sets={a: 1, a: 2}")


def test_files_may_begin_with_a_byte_order_mark_and_must_be_utf8(tmp_path: Path) -> None:
    file = tmp_path / "car.yaml"
    file.write_text("wheels: 3\n", encoding="utf-8-sig")
    assert Car.load([file], []).wheels == 3
    file.write_text("wheels: 3\n", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"car\.yaml: not UTF-8 text .*save it as UTF-8"):
        Car.load([file], [])
