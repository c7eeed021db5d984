"""CoreWeave's client `cwtrain`, as it comes from PyPI, publishes to our control plane: full, delta, conflict, rollback.

Runs under a Python that has cwtrain (3.12 or newer) and knows nothing of Groundhop:
`python cwtrain_drive.py CONTROL_URL DEPLOYMENT S3_URL FOLDER`, S3 credentials from AWS_*. Prints one JSON object.
"""

import json
import struct
import sys
from pathlib import Path

import boto3
import numpy as np
from botocore.config import Config
from cwtrain.errors import HotLoadInProgressError
from cwtrain.hotload import HotLoader, SnapshotConflictError
from cwtrain.hotload.delta import write_delta
from cwtrain.infra.client import InferenceClient

SHAPE = (64, 48)


def write_checkpoint(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A Hugging Face folder with one shard of BF16 tensors, given as their 16-bit patterns."""
    folder.mkdir(parents=True)
    header, offset = {}, 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    body = b"".join(bits.tobytes() for bits in tensors.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + body)
    index = {"metadata": {"total_size": offset}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def step(tensors: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """One per cent of the elements take another pattern, NaN payloads and signed zeros among them."""
    changed = {}
    for name, bits in tensors.items():
        flat = bits.copy().reshape(-1)
        flat[rng.choice(flat.size, flat.size // 100, replace=False)] ^= rng.integers(1, 2**16, dtype=np.uint16)
        changed[name] = flat.reshape(bits.shape)
    return changed


def main(control: str, deployment: str, s3_url: str, folder: Path) -> None:
    rng = np.random.default_rng(0)
    one = {f"layers.{i}.weight": rng.integers(0, 2**16, SHAPE, dtype=np.uint16) for i in range(4)}
    two = step(one, rng)
    first, second = write_checkpoint(folder / "one", one), write_checkpoint(folder / "two", two)
    other = write_checkpoint(folder / "other", step(one, rng))
    s3 = boto3.client("s3", endpoint_url=s3_url, config=Config(s3={"addressing_style": "path"}))
    loader = HotLoader(InferenceClient(base_url=control), deployment, s3=s3, poll_interval=0.1, timeout=240)
    loader.wait_for_deployment_ready()
    done: dict[str, object] = {"access": loader.check_snapshot_access()}

    full = loader.publish(first, "weight_v000001")
    loader.verify_served(full.id, "weight_v000001")
    done["full"] = full.state.name

    write_delta(first, second, folder / "delta", version="000002", base_version="000001")
    delta = loader.publish(folder / "delta", "weight_v000002")
    loader.verify_served(delta.id, "weight_v000002")
    done["delta"] = [delta.state.name, [link.identity for link in delta.spec.snapshot_chain]]

    try:
        loader.upload(other, "weight_v000001")
    except SnapshotConflictError as error:
        done["conflict in the store"] = error.conflicts
    loader.upload(other, "weight_v000003")
    running = loader.trigger("weight_v000003", loader_info(other))
    try:
        loader.trigger("weight_v000001", wait_for_active=False)
    except HotLoadInProgressError as error:
        done["conflict in the deployment"] = error.code
    loader.wait(running.id)

    back = loader.rollback("weight_v000002")
    loader.verify_served(back.id, "weight_v000002")
    done["rollback"] = [back.state.name, loader.current_identity()]
    again = loader.client.create_hot_load(deployment, "weight_v000002", hot_load_id=back.id)
    done["the same id again"] = again.id == back.id
    print(json.dumps(done))


def loader_info(path: Path):
    from cwtrain.hotload import inspect_snapshot

    return inspect_snapshot(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
