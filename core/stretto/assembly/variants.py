"""The variants of an A/B test, each as a run of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from stretto.assembly.compose import Composed
from stretto.assembly.sections import VARIANT_SECTIONS
from stretto.config import RunConfig, VariantConfig, Variants

BASE = ""
"""Name that stands for the run's own sections, which evaluations use."""


def variants_of(config: RunConfig) -> dict[str, VariantConfig]:
    """Return the variants of a run by name, in their order in the run file."""
    return {name: getattr(config.variants, name) for name in config.variants.__struct_fields__}


def own_sections(variant: VariantConfig) -> dict[str, Any]:
    """Return key -> section for the sections that a variant sets itself."""
    sections = {key: getattr(variant, key) for key in (*VARIANT_SECTIONS, "sampling")}
    return {key: section for key, section in sections.items() if section is not None}


def runs_of(composed: Composed) -> Mapping[str, Composed]:
    """Return the run itself under `BASE`, and each variant as a run of its own under its name."""
    variants = {name: run_of_variant(composed, name) for name in variants_of(composed.config)}
    return {BASE: composed, **variants}


def run_of_variant(composed: Composed, name: str) -> Composed:
    """Return the run without variants, and with the sections of one variant in place of its own."""
    sections = own_sections(variants_of(composed.config)[name])

    def place(path: str) -> str:
        return composed.place(f"variants.{name}.{path}" if path.partition(".")[0] in sections else path)

    components = {
        path: component for path, component in composed.components.items() if not path.startswith("variants.")
    }
    chosen = {key: f"variants.{name}.{key}" for key in sections if key in VARIANT_SECTIONS}
    components |= {key: composed.components[path] for key, path in chosen.items()}
    config = msgspec.structs.replace(composed.config, variants=Variants(), **sections)
    return replace(composed, config=config, components=components, place=place)
