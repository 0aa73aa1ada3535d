"""Every supported release of the libraries has the names that we rely on, or a feature is off.

From the list of `support/symbol_lists.py`, without installing anything. torch is left out: its private names
are checked in the installed release only.
"""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version
from support import symbol_lists
from support.symbol_lists import BEHAVIOURS, FEATURES, MINORS, WATCHED, is_on, parameters_in, place_of

from grpo_run.runtime.upstream import rollout_names, trainer_names
from grpo_run.runtime.upstream.features import LEAVING_ROWS, PLAN

WITH_DEFAULT = {
    trainer_names.RUN_EPOCH: "before transformers 5.3 epochs are skipped in another way",
    trainer_names.FIRST_STEP: "before transformers 5.19 nothing is subtracted from the steps of a call",
    rollout_names.EOS_TOKENS: "before TRL 1.14 there is one token, of the trainer",
    rollout_names.EOS_TOKEN: "from TRL 1.3 on it is the tokenizer's",
    rollout_names.TOKENIZER: "before TRL 1.3 the trainer has the token itself",
    trainer_names.ENVIRONMENTS: "before TRL 1.8 there is a list",
    trainer_names.FACTORIES: "before TRL 1.8 boots of environments are not marked",
    trainer_names.ENVIRONMENT_LIST: "before TRL 0.29 there are no environments",
    "_pending_extra_logs": "before TRL 1.0 reward functions log nothing",
    "_pending_metrics": "before TRL 1.0 reward functions log nothing",
    trainer_names.ENGINE: "before TRL 0.28 there is no such object, and caps are off",
    trainer_names.WEIGHTS_SLEEP: "before TRL 1.10 no memory plan lets vLLM sleep",
    "VLLMGeneration": "before TRL 0.28 there is no such module, and no engine to leave out",
    "split_pixel_values_by_grid": "imported for images only",
    "unsplit_pixel_values_by_grid": "imported for images only",
}
"""Names that are looked up with a default, and what follows where they are missing."""


def owned(place: str, name: str, library: str, minor: str) -> bool:
    """Whether a feature is off in a release that needs the name, or names that it comes with."""
    return any(
        not is_on(feature, library, minor)
        and (
            name in feature.set_later
            or (place, name)
            in [place_of(need, kind) for kind, needs in feature.needs.items() for need in needs]
        )
        for feature in FEATURES
    )


@pytest.mark.parametrize("place", WATCHED)
def test_a_name_is_in_every_release_or_a_feature_is_off(place: str) -> None:
    library = place.partition(".")[0]
    missing = [
        f"{library} {minor}: {name}"
        for minor in MINORS[library]
        for name in WATCHED[place]
        if parameters_in(library, minor, place, name) is None
        and name not in WITH_DEFAULT
        and not owned(place, name, library, minor)
    ]
    assert missing == []


@pytest.mark.parametrize("behaviour", [one for one in BEHAVIOURS if ">=" not in one])
def test_a_behaviour_is_in_every_release(behaviour: str) -> None:
    assert [one for one in MINORS["trl"] if parameters_in("trl", one, "behaviour", behaviour) is None] == []


@pytest.mark.parametrize("behaviour", [one for one in BEHAVIOURS if ">=" in one])
def test_a_behaviour_begins_with_the_release_that_the_table_names(behaviour: str) -> None:
    """At run time only the version is compared."""
    library, _, first = behaviour.partition(">=")
    for minor in MINORS[library]:
        there = parameters_in(library, minor, "behaviour", behaviour) is not None
        assert there == (Version(minor) >= Version(first)), minor


def test_every_need_of_a_feature_is_watched() -> None:
    for feature in FEATURES:
        for kind, needs in feature.needs.items():
            for need in needs:
                place, name = place_of(need, kind)
                assert name in (BEHAVIOURS if place == "behaviour" else WATCHED[place]), need


def test_a_feature_that_no_release_has_would_be_found() -> None:
    """The list tells releases apart."""
    assert [one for one in MINORS["trl"] if is_on(PLAN, "trl", one)] == ["1.16"]
    assert not is_on(LEAVING_ROWS, "trl", "1.5")
    assert is_on(LEAVING_ROWS, "trl", "1.6")


def test_every_name_of_a_trainer_is_watched() -> None:
    """A new name in the two modules must be added to the list."""
    watched = {name for names in WATCHED.values() for name in names}
    no_attribute = {
        trainer_names.INTERNAL_SAVE,  # an argument of `save_model`
        *("completion_mask", "tool_mask", "num_items_in_batch", "old_logps", "advantages", "completion_ids"),
        *("prompt_ids", "prompt_mask", "frac_reward_zero_std"),  # keys of a rollout, and of what is logged
    }
    names = {
        value
        for module in (trainer_names, rollout_names)
        for constant, value in vars(module).items()
        if constant.isupper() and isinstance(value, str)
    }
    assert names - no_attribute - watched == set()


class Installed:
    """The installed release of a library, to be read as its wheel is."""

    def __init__(self, library: str) -> None:
        spec = find_spec(library)
        assert spec is not None
        assert spec.origin is not None
        self.root = Path(spec.origin).parents[1]

    def namelist(self) -> Installed:
        return self

    def __contains__(self, file: str) -> bool:
        return (self.root / file).is_file()

    def read(self, file: str) -> bytes:
        return (self.root / file).read_bytes()


@pytest.mark.parametrize("library", MINORS)
def test_the_list_says_of_the_installed_release_what_it_has(library: str) -> None:
    """Every name with its parameters, and every behaviour."""
    minor = ".".join(importlib.metadata.version(library).split(".")[:2])
    found = {
        (place, name): parameters
        for place, names in symbol_lists.collect(library, Installed(library)).items()  # type: ignore[arg-type]
        for name, parameters in names.items()
    }
    said = {
        (place, name): parameters
        for place, names in symbol_lists.symbols()[library].items()
        for name in names
        if (parameters := parameters_in(library, minor, place, name)) is not None
    }
    assert found == said


def test_the_page_has_the_table() -> None:
    """`python -P -m support.symbol_lists` writes it."""
    text = symbol_lists.PAGE.read_text(encoding="utf-8")
    assert symbol_lists.page(text) == text


def test_the_list_is_small() -> None:
    assert symbol_lists.FILE.stat().st_size < 200_000
