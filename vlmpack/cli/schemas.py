"""`vlmpack schema`: what each verb prints with `--json`, as a JSON Schema (draft 2020-12).

Every field is listed and described, and no other is printed. Fields are added by minor versions; none is renamed or
removed without a line in the changelog.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vlmpack.cli import options

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema(
    verb: Annotated[
        str,
        typer.Argument(
            help="analyze, demo, doctor, doctor-probe, pack, serve or show.", autocompletion=lambda: list(SCHEMAS)
        ),
    ],
) -> None:
    """Print the JSON Schema of what a verb prints with --json; doctor-probe is doctor with --probe."""
    options.check_word("VERB", verb, list(SCHEMAS))
    typer.echo(json.dumps({"$schema": DRAFT, "title": f"vlmpack {verb} --json", **SCHEMAS[verb]}, indent=2))


# ---------------------------------------------------------------------- parts of schemas


def record(description: str, fields: Mapping[str, Schema]) -> Schema:
    """Describe an object that has these fields, all of them and no others."""
    return {
        "type": "object",
        "description": description,
        "properties": dict(fields),
        "required": list(fields),
        "additionalProperties": False,
    }


def mapping(description: str, values: Schema) -> Schema:
    """Describe an object whose names are those of things, such as reasons."""
    return {"type": "object", "description": description, "additionalProperties": values}


def array(description: str, items: Schema) -> Schema:
    """Describe a list."""
    return {"type": "array", "description": description, "items": items}


def count(description: str) -> Schema:
    """Describe a whole number of 0 or more."""
    return {"type": "integer", "minimum": 0, "description": description}


def number(description: str) -> Schema:
    """Describe a number."""
    return {"type": "number", "description": description}


def text(description: str, *words: str) -> Schema:
    """Describe a string, or one of these words."""
    return {"type": "string", "description": description, **({"enum": list(words)} if words else {})}


def flag(description: str) -> Schema:
    """Describe true or false."""
    return {"type": "boolean", "description": description}


def optional(part: Schema) -> Schema:
    """Allow null, too."""
    kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
    return {**part, "type": [*kinds, "null"]}


def name(description: str) -> Schema:
    """Describe the id of a sample: a whole number or a string."""
    return {"type": ["integer", "string"], "description": description}


# ---------------------------------------------------------------------- analyze

_SUMMARY = record(
    "Of all samples.",
    {
        **{part: number(f"The {part} of a sample.") for part in ("mean", "median")},
        "p95": number("95th percentile."),
        "p99": number("99th percentile."),
        "max": count("The largest."),
        "total": count("All samples together."),
    },
)
_PADDING = {
    "tokens": count("Real tokens."),
    "computed": count("Tokens that are computed, padding included."),
    "waste": number("Part of the computed tokens that is padding, 0 to 1."),
}
_COMPUTED = {
    "tokens": count("Tokens."),
    "patches": count("Vision patches."),
    "attended_pairs": count("Pairs of query and key, a layer and head."),
}
_SIMULATION = record(
    "The samples packed into rows of one capacity.",
    {
        "capacity": count("Tokens that a row may hold."),
        "samples": count("Samples in rows."),
        "tokens": count("Their tokens."),
        "rows": count("Rows."),
        "least_rows": count("Lower bound: no packing needs fewer rows."),
        "most_samples": count("Samples of the row that has the most."),
        "longest": count("Tokens of the longest sample in a row."),
        "samples_deviation": number("Standard deviation of the samples of a row."),
        "strategy": text("How samples were placed.", *options.STRATEGIES),
        "limits": mapping("Further limits of a row: of patches, of images.", count("The limit.")),
        "rows_per_device": count("Rows of a batch, on each rank."),
        "patch_skew": optional(
            number("Patches of the rank that has most over the mean; null: one rank, or no images.")
        ),
        "balanced_patch_skew": optional(number("The same if rows are handed out by balance_rows.")),
        "computed": optional(record("What an epoch computes.", _COMPUTED)),
        "fill": number("Tokens computed per token of row, 0 to 1."),
        "samples_per_row": number("Mean samples of a row."),
        "accumulation": count("Gradient accumulation that keeps the padded recipe's samples per update."),
        "samples_per_update": number("Samples that an update then sees, on average."),
        "steps": count("Forward and backward passes of a rank in an epoch."),
        "updates": count("Updates of the weights in an epoch."),
        "oversize": array(
            "Samples that exceed a row by themselves.",
            record("One.", {"sample": count("Its place in the data set."), "tokens": count("Its tokens.")}),
        ),
        "explained": array("The same in sentences.", text("One.")),
    },
)
_EPOCH = {"rows": count("Rows."), **_COMPUTED}
_SAVINGS = record(
    "What computing each shared prefix once would save.",
    {
        "min_shared": count("Tokens of the shortest prefix that counts as shared."),
        "groups": count("Groups of samples that begin alike."),
        "samples": count("Samples in them."),
        "packed": array(
            "One entry a capacity; none if no samples begin alike.",
            record(
                "Rows of one capacity.",
                {
                    "capacity": count("Tokens that a row may hold."),
                    "plain": record("An epoch without sharing.", _EPOCH),
                    "shared": record("An epoch with sharing.", _EPOCH),
                    "saved": mapping("The part of each count that is saved, 0 to 1.", number("The part.")),
                },
            ),
        ),
    },
)
_MIX = mapping(
    "The data sets of --mix by their names, with which the ids of their samples begin; null: there is one data set.",
    record(
        "One data set.",
        {
            "weight": number("Its share of the samples."),
            "size": count("Samples that it has."),
            "samples": count("Samples of it in this epoch, before any is left out."),
            "passes": number("Passes over it in this epoch."),
        },
    ),
)
_ANALYZE = record(
    "Lengths of a data set, and packing simulated.",
    {
        "source": text("The data set, as it was named; of a mix, all of them."),
        "mix": optional(_MIX),
        "samples": count("Samples that can be used."),
        "refused": record(
            "Samples that cannot be used.",
            {
                "samples": count("How many."),
                "reasons": mapping("How many by reason.", count("Samples.")),
                "listed": array(
                    "Each of them.",
                    record(
                        "One sample.",
                        {
                            "index": count("Its place in the data set."),
                            "sample_id": optional(name("Its id, where it has one.")),
                            "reason": text("The reason, a word."),
                            "detail": text("The fault and the remedy."),
                        },
                    ),
                ),
            },
        ),
        "images": count("Images."),
        "videos": count("Videos."),
        "estimate": flag("Image tokens are estimated by --estimate."),
        "columns": mapping("tokens, and text, image, video, targets, patches where there are any.", _SUMMARY),
        "padded": record(
            "The padded recipe.",
            {
                "world_size": count("Ranks."),
                "per_device_batch": count("Samples of a batch, on each rank."),
                "accumulation": count("Batches that are added up before an update."),
                "samples_per_update": count("Samples that an update sees."),
                "updates": count("Updates of an epoch."),
                "to_longest": record("Batches padded to their longest sample.", _PADDING),
                "to_max": record("Batches padded to the longest sample of all.", _PADDING),
            },
        ),
        "packed": array("One entry a capacity; none if no sample can be used.", _SIMULATION),
        "shared_prefixes": optional(_SAVINGS),
    },
)

# ---------------------------------------------------------------------- pack, show

_PACK = record(
    "The folder of rows.",
    {
        "out": text("The folder."),
        "capacity": count("Tokens that a row may hold."),
        "fill_ratio": number("Tokens of samples per token of row, 0 to 1."),
        "counts": record(
            "Totals.",
            {
                "total": count("Samples of the data set."),
                "refused": count("Samples that cannot be used, or are longer than --max-length."),
                "dropped": count("Samples that exceed a row by themselves."),
                "samples": count("Samples in rows."),
                "rows": count("Rows."),
                "tokens": count("Tokens of all samples."),
                "targets": count("Tokens with a loss."),
                "images": count("Images."),
                "videos": count("Videos."),
                "patches": count("Vision patches."),
            },
        ),
        "sizes": record(
            "Largest sizes of any row.",
            {
                "longest_row": count("Tokens of the longest row."),
                "longest_segment": count("Tokens of the longest sample."),
                "most_segments": count("Samples."),
                "most_images": count("Images and videos."),
                "most_patches": count("Vision patches."),
            },
        ),
        "files": count("Files of rows."),
        "bytes": count("Their size."),
        "reasons": mapping("Samples left out, by reason.", count("Samples.")),
        "left_out": optional(text("The file that lists samples left out; null: there are none.")),
        "mix": optional(_MIX),
    },
)
_TREE = record(
    "What the samples of a row share; lists have an entry a node.",
    {
        "tokens": count("Tokens of the samples."),
        "computed": count("Tokens that are computed."),
        "attended_pairs": count("Pairs of query and key that are computed, a layer and head."),
        "plain_pairs": count("The same without sharing."),
        "levels": count("Nodes of the longest path."),
        "parents": array("The node above each; -1: none.", {"type": "integer", "minimum": -1}),
        "lengths": array("Tokens.", count("Tokens.")),
        "leaves": array("The node at which each sample ends.", count("A node.")),
        "media": array("Tokens of images and videos.", count("Tokens.")),
        "images": array("Images.", count("Images.")),
        "videos": array("Videos.", count("Videos.")),
    },
)
_SHOW = record(
    "Rows.",
    {
        "summary": text("The source in one line."),
        "rows": array(
            "The rows that --row names.",
            record(
                "One row.",
                {
                    "row": count("Its number."),
                    "capacity": count("Tokens that it may hold."),
                    "samples": array(
                        "Its samples, in their order.",
                        record(
                            "One sample.",
                            {
                                "sample": name("Its id, or else its place in the data set."),
                                "tokens": count("Tokens."),
                                "media_tokens": count("Those of images and videos."),
                            },
                        ),
                    ),
                    "tree": optional(_TREE),
                },
            ),
        ),
    },
)

# ---------------------------------------------------------------------- demo, serve

_STEPS = "one entry a step"
_RUN = record(
    "One training.",
    {
        "layout": text("Of its batches.", "padded", "packed"),
        "lengths": array(f"Real tokens of each sample, {_STEPS}.", array("A step.", count("Tokens of a sample."))),
        "physical": array(f"Tokens that went through the model, {_STEPS}.", count("Tokens.")),
        "seconds": array(f"Forward, backward and optimiser, {_STEPS}.", number("Seconds.")),
        "losses": array(f"Loss in nats per target, {_STEPS}.", number("Nats.")),
        "peak_bytes": count("Most memory during the largest step."),
    },
)
_DEMO = record(
    "Both trainings; the same as demo.json.",
    {
        "settings": record(
            "As they were given.",
            {
                "model": optional(text("Hub id or folder; null: made here.")),
                "data": text("The receipts."),
                "device": text("The device.", *options.DEVICES),
                "dtype": text("Element type.", *options.DTYPES),
                "steps": count("Optimiser steps."),
                "batch_size": count("Samples of a step."),
                "seed": count("Of weights, receipts and their order."),
                "out": text("The folder of pictures and numbers."),
            },
        ),
        "padded": _RUN,
        "packed": _RUN,
        "gradients": record(
            "Gradients of a packed batch against each of its samples alone.",
            {
                "cosine": number("The smallest cosine of any parameter."),
                "parameter": text("That parameter."),
                "parameters": count("Parameters that were compared."),
            },
        ),
    },
)
_SERVE = record(
    "The service, printed once it takes requests.",
    {
        "address": text("Base URL."),
        "key_file": optional(text("File with the key; null: the key is in VLMPACK_API_KEY.")),
        "model": text("What clients call the model."),
        "architecture": text("Its model_type."),
        "takes_images": flag("It takes images beside text."),
        "state": text("Folder of journal and weights."),
        "limits": record(
            "What is refused beyond.",
            {
                "datum_tokens": count("Tokens of a datum or prompt."),
                "row_tokens": count("Tokens of a packed row."),
                "row_patches": count("Vision patches of a packed row."),
                "models": count("Models of all clients at one time."),
                "rank": count("Rank of an adapter."),
                "body_bytes": count("Bytes of a request."),
            },
        ),
    },
)

# ---------------------------------------------------------------------- doctor

_SERVING = array(
    "What serves on each kind of device.",
    record(
        "One back-end.",
        {
            "backend": text("Its name."),
            "device": text("Kind of device."),
            "dtype": text('Element type, or "any".'),
            "reasons": array("Why it cannot serve; empty: it can.", text("One reason.")),
        },
    ),
)
_DOCTOR = record(
    "The environment.",
    {
        "versions": array(
            "Packages.",
            record(
                "One package.",
                {
                    "name": text("As pip names it."),
                    "version": optional(text("null: not installed.")),
                    "problem": optional(text("The error of its import; null: none.")),
                    "note": optional(text("Newer than the newest version that was tested; null: it is not.")),
                },
            ),
        ),
        "devices": array(
            "Devices.", record("One device.", {"type": text("Its kind.", *options.DEVICES), "name": text("Its name.")})
        ),
        "attention": _SERVING,
        "gated_delta": _SERVING,
    },
)
_VERDICT = text("exact, or what goes wrong.", "exact", "leaks", "differs", "fails", "not deterministic")
_CAUSES = array("Mechanisms at fault.", text("A mechanism."))
_PROBE = record(
    "One probe.",
    {
        "verdict": _VERDICT,
        "causes": _CAUSES,
        "model": text("Class of the model."),
        "family": text("Its model_type."),
        "weights": text("The weights that were probed."),
        "device": text("Kind of device."),
        "dtype": text("Element type of the weights."),
        "attention": text("The attention back-end that served."),
        "samples": array("Kind and length of each sample.", text("One sample.")),
        "row_tokens": count("Width of the row, gaps included."),
        "checks": array(
            "Every check, good or bad.",
            record(
                "One check.",
                {
                    "part": text("What it is about.", "isolation", "equality", "mechanism", "work"),
                    "name": text("The quantity, the circumstance before its colon."),
                    "finding": text(
                        "Its result.", "ok", "leaks", "differs", "fails", "not deterministic", "syncs", "absent",
                        "not counted",
                    ),
                    "value": optional(number("A part of the largest entry, or a count.")),
                    "allowed": optional(number("The most that it may be.")),
                    "cause": optional(text("The mechanism at fault.")),
                    "detail": text("One sentence, or nothing."),
                },
            ),
        ),
        "circumstances": mapping("In which samples were packed: a word, and its title.", text("The title.")),
        "plain": array(
            "Plain transformers as the baseline; it does not count for the verdict.",
            record(
                "One form of its input.",
                {
                    "name": text("The form."),
                    "verdict": _VERDICT,
                    "leak": optional(number("How far a sample's logits move when only another one changes.")),
                    "logits": optional(number("Largest error against the samples alone.")),
                    "loss": optional(number("Relative error against the samples alone.")),
                    "pairs": optional(count("Pairs of query and key, a layer.")),
                    "causes": _CAUSES,
                    "detail": text("The error that it raised, or nothing."),
                },
            ),
        ),
    },
)  # fmt: skip
_DOCTOR_PROBE = record(
    "Probes.",
    {
        "probes": array("One a family and back-end.", _PROBE),
        "complete": flag("All were probed; false: an error or Ctrl-C came first."),
        "healthy": flag("All were probed and are exact; the exit status is then 0, else 1."),
    },
)

SCHEMAS: Mapping[str, Schema] = {
    "analyze": _ANALYZE,
    "demo": _DEMO,
    "doctor": _DOCTOR,
    "doctor-probe": _DOCTOR_PROBE,
    "pack": _PACK,
    "serve": _SERVE,
    "show": _SHOW,
}
