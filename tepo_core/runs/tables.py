"""The tables of a run: lines that grow while it trains, parquet files in its folder."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

GROWING = {"tokens.jsonl": "tokens.parquet", "responses.jsonl": "responses.parquet", "facts.jsonl": "facts.parquet"}


def write_tables(source: Path, out: Path) -> None:
    """Turn the growing files of a workspace into the parquet tables of the run folder. Absent ones are left out."""
    for name, table in GROWING.items():
        if (source / name).is_file() and (source / name).stat().st_size:
            frame = pd.read_json(source / name, lines=True, dtype=False)
            pq.write_table(
                pa.Table.from_pandas(frame, preserve_index=False), out / table, compression="zstd", store_schema=False
            )
