"""Device: the catalogue, the user's file, the SRAM override, and detection (a recorded CuPy, no GPU)."""

import copy
import pickle
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from importlib import resources
from types import ModuleType, SimpleNamespace

import pytest

from cupyflash.device import PEAK_DTYPES, Device

FIGURES = {field.name for field in fields(Device)} - {"name"}
KB = 1024

# KB that a block may opt in to, KB a multiprocessor (NVIDIA CCCL, cuda/__device/arch_traits.h).
SHARED_MEMORY = {
    (7, 5): (64, 64),
    (8, 0): (163, 164),
    (8, 6): (99, 100),
    (8, 9): (99, 100),
    (9, 0): (227, 228),
    (10, 0): (227, 228),
    (12, 0): (99, 100),
}
NAMES = [
    *("T4", "A10", "RTX A6000", "A100-40GB", "A100-80GB", "L4", "RTX 3090", "RTX 4070 Ti SUPER", "RTX 4090", "RTX 5090"),
    *("H100-SXM", "H100-PCIe", "H200", "B200"),
]


def raw_catalogue():
    return tomllib.loads(resources.files("cupyflash").joinpath("devices.toml").read_text())


# --- the catalogue


def test_catalogue_holds_every_promised_device_once():
    assert [device.name for device in Device.catalogue()] == NAMES


@pytest.mark.parametrize("device", Device.catalogue(), ids=lambda device: device.name)
def test_catalogue_figures_fit_the_architecture(device):
    block, sm = SHARED_MEMORY[device.compute_capability]
    assert (device.sram_per_block, device.sram_per_sm) == (block * KB, sm * KB)
    assert device.registers_per_sm == 65536
    assert device.sm == "sm_{}{}".format(*device.compute_capability)
    # bfloat16 and tf32 came with compute capability 8.0, at the rate of float16 and at half of it.
    peak = device.tensor_peak
    ampere = device.compute_capability >= (8, 0)
    assert set(peak) == (set(PEAK_DTYPES) if ampere else {"float16", "float32"})
    if ampere:
        assert peak["bfloat16"] == peak["float16"]
        assert peak["tf32"] == pytest.approx(peak["float16"] / 2, rel=0.03)
    assert peak["float32"] < peak["float16"]
    # 64 FMA lanes a multiprocessor on 7.5 and 8.0, 128 since: the clock that the peak implies is a boost clock, of which the
    # RTX 4070 Ti SUPER has the highest, 2.61 GHz.
    lanes = 64 if device.compute_capability in ((7, 5), (8, 0)) else 128
    assert 1.4e9 < peak["float32"] / (2 * lanes * device.sm_count) < 2.62e9
    # FLOP a byte of device memory: a unit error (GB for bytes, bits for bytes) leaves this range.
    assert 8 < peak["float32"] / device.hbm_bandwidth < 120
    assert 4 * KB**2 <= device.l2_bytes <= 128 * KB**2


def test_every_catalogue_figure_names_its_source():
    for name, table in raw_catalogue().items():
        assert set(table["sources"]) == FIGURES, name
        assert all(len(source) > 10 for source in table["sources"].values()), name


def test_cuda_names_lead_to_one_device_each():
    claimed = [name for table in raw_catalogue().values() for name in table["cuda_names"]]
    assert len(claimed) == len(set(claimed))
    for name, table in raw_catalogue().items():
        for cuda_name in table["cuda_names"]:
            assert Device.named(cuda_name).name == name


# --- names


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100-40GB", "A100-40GB"),
        ("a100 40gb", "A100-40GB"),
        ("A100_40GB", "A100-40GB"),
        ("rtx4090", "RTX 4090"),
        ("RTX-5090", "RTX 5090"),
        ("h100 sxm", "H100-SXM"),
        ("NVIDIA H200", "H200"),
        ("A100-SXM4-80GB", "A100-80GB"),  # drivers before 2021 leave 'NVIDIA' out
    ],
)
def test_named_ignores_case_and_separators(spelling, name):
    assert Device.named(spelling).name == name


@pytest.mark.parametrize("name", ["", "A100", "H100-NVL", "GTX 480", "NVIDIA", "A10G"])
def test_unknown_name_is_refused_and_the_names_are_listed(name):
    with pytest.raises(ValueError) as caught:
        Device.named(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in NAMES)


def test_unknown_name_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"did you mean RTX 4090"):
        Device.named("RTX 409")


# --- SRAM


@pytest.mark.parametrize(
    ("sram", "size"),
    [
        ("100KB", 100 * KB),
        ("100 KiB", 100 * KB),
        ("8kb", 8 * KB),
        ("8 k", 8 * KB),
        (" 166912 ", 166912),
        ("166912B", 166912),
        ("1MB", KB**2),
        ("1GiB", KB**3),
        ("1024GB", 2**40),
        (1, 1),
        (2**40, 2**40),
    ],
)
def test_sram_override(sram, size):
    plain = Device.named("A100-40GB")
    device = Device.named("A100-40GB", sram=sram)
    assert device == plain.with_sram(sram)
    assert device.sram_per_block == size
    assert device.sram_per_sm == max(plain.sram_per_sm, size)
    assert replace(device, sram_per_block=plain.sram_per_block, sram_per_sm=plain.sram_per_sm) == plain


def test_sram_takes_numpy_integers():
    numpy = pytest.importorskip("numpy")
    size = Device.named("T4").with_sram(numpy.int64(4096)).sram_per_block
    assert (size, type(size)) == (4096, int)


@pytest.mark.parametrize(
    "sram",
    ["", "0", "0KB", 0, -1, "-1KB", "lots", "1.5KB", "1e3", "KB", "1TB", "1KBB", "1 2", "²KB", 2**40 + 1, "9" * 5000],
)
def test_bad_sram_is_refused(sram):
    with pytest.raises(ValueError) as caught:
        Device.named("A100-40GB", sram=sram)
    assert f"sram = {sram!r}: allowed are" in str(caught.value)


@pytest.mark.parametrize("sram", [1e5, True, None, b"100KB"])
def test_sram_of_a_wrong_type_is_refused(sram):
    with pytest.raises(TypeError, match="sram = "):
        Device.named("A100-40GB").with_sram(sram)


# --- the value


def test_device_is_a_value():
    one, other = Device.named("H200"), Device.named("h200")
    assert one == other and hash(one) == hash(other)
    assert len({one, other, one.with_sram("8KB"), Device.named("H100-SXM")}) == 3
    assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)
    backwards = dict(reversed(list(one.tensor_peak.items())))
    assert replace(one, tensor_peak=backwards) == one
    assert hash(replace(one, tensor_peak=backwards)) == hash(one)
    with pytest.raises(AttributeError):
        one.sm_count = 1
    with pytest.raises(TypeError):
        one.tensor_peak["float16"] = 1.0
    with pytest.raises(KeyError):
        one.tensor_peak["float64"]


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("name", " ", ValueError),
        ("compute_capability", (8,), ValueError),
        ("compute_capability", (0, 1), ValueError),
        ("compute_capability", "8.0", ValueError),
        ("sm_count", 0, ValueError),
        ("sm_count", 108.0, TypeError),
        ("sm_count", True, TypeError),
        ("l2_bytes", -1, ValueError),
        ("sram_per_block", 164 * KB + 1, ValueError),  # more than the multiprocessor has
        ("hbm_bandwidth", float("nan"), ValueError),
        ("hbm_bandwidth", float("inf"), ValueError),
        ("hbm_bandwidth", "2TB/s", TypeError),
        ("tensor_peak", {"fp16": 1.0}, ValueError),
        ("tensor_peak", {"float16": 0}, ValueError),
        ("tensor_peak", None, TypeError),
    ],
)
def test_bad_figures_are_refused(key, value, error):
    with pytest.raises(error, match=key):
        replace(Device.named("A100-40GB"), **{key: value})


# --- a user's file

MINE = """
[Mine]
compute_capability = [9, 9]
sram_per_block = "3KB"
sram_per_sm = 4096
registers_per_sm = 100
sm_count = 2
l2_bytes = "1MB"
hbm_bandwidth = 5e9
tensor_peak = { float32 = 7e9 }
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_from_file_reads_every_figure(write):
    expected = Device("Mine", (9, 9), 3072, 4096, 100, 2, KB**2, 5e9, {"float32": 7e9})
    path = write(MINE)
    assert Device.from_file(path) == Device.from_file(str(path), name="mine") == expected
    assert Device.named(str(path)) == Device.named(path) == expected
    assert Device.from_file(path, sram="8KB") == Device.named(path, "8KB") == expected.with_sram(8192)


def test_the_catalogue_is_in_the_users_format(write):
    path = write(resources.files("cupyflash").joinpath("devices.toml").read_bytes(), "Copy.TOML")
    assert tuple(Device.from_file(path, name=name) for name in NAMES) == Device.catalogue()


def test_a_file_with_several_devices_needs_a_name(write):
    path = write(MINE + MINE.replace("[Mine]", "[Yours]"))
    assert Device.from_file(path, name="YOURS").name == "Yours"
    for name in (None, "H200"):
        with pytest.raises(ValueError, match=r"name = .*allowed are Mine, Yours"):
            Device.from_file(path, name=name)


@pytest.mark.parametrize("key", sorted(FIGURES))
def test_a_missing_key_is_named(write, key):
    path = write("\n".join(line for line in MINE.splitlines() if not line.startswith(key)))
    with pytest.raises(ValueError, match=f"mine.toml: device 'Mine': missing {key}$"):
        Device.from_file(path)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("sm_count = 2", "sm_count = 0", "sm_count"),
        ("sm_count = 2", "sm_count = -2", "sm_count"),
        ("sm_count = 2", "sm_count = 2.0", "sm_count"),
        ("sm_count = 2", 'sm_count = "2"', "sm_count"),
        ("sm_count = 2", "sm_count = true", "sm_count"),
        ("[9, 9]", "9.9", "compute_capability"),
        ("[9, 9]", "[9, 9, 0]", "compute_capability"),
        ('"3KB"', '"three"', "sram_per_block"),
        ('"3KB"', "[3]", "sram_per_block"),
        ('"3KB"', '"5KB"', "sram_per_block"),
        ("4096", "-4096", "sram_per_sm"),
        ("5e9", "inf", "hbm_bandwidth"),
        ("5e9", "-5e9", "hbm_bandwidth"),
        ("float32 = 7e9", "float8 = 7e9", "float8"),
        ("float32 = 7e9", 'float32 = "fast"', "tensor_peak.float32"),
        ("{ float32 = 7e9 }", "7e9", "tensor_peak"),
        ("sm_count = 2", "sm_count = 2\nsm_cuont = 2", "sm_cuont"),
        ("sm_count = 2", "sm_count = 2\ncuda_names = 'Mine'", "cuda_names"),
    ],
)
def test_a_bad_figure_names_file_device_and_key(write, old, new, key):
    assert MINE.count(old) == 1
    path = write(MINE.replace(old, new))
    with pytest.raises(ValueError) as caught:
        Device.from_file(path)
    assert str(caught.value).startswith(f"{path}: device 'Mine': ")
    assert key in str(caught.value)


@pytest.mark.parametrize("text", ["", "# empty", "x = 1", "[broken", b"\xff\xfe"])
def test_a_file_without_devices_is_refused(write, text):
    with pytest.raises(ValueError, match=r"mine\.toml"):
        Device.from_file(write(text))


def test_an_absent_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Device.named(str(tmp_path / "absent.toml"))


# --- detection

# Attributes as CUDA gives them, of a card in the catalogue (openxla/xla, a100_sxm_40.txtpb) and of one not in it.
A100 = {
    "name": "NVIDIA A100-SXM4-40GB",
    "cc": (8, 0),
    "MaxSharedMemoryPerBlock": 49152,
    "MaxSharedMemoryPerBlockOptin": 166912,
    "MaxSharedMemoryPerMultiprocessor": 167936,
    "MaxRegistersPerMultiprocessor": 65536,
    "MultiProcessorCount": 108,
    "L2CacheSize": 41943040,
    "MemoryClockRate": 1215000,
    "GlobalMemoryBusWidth": 5120,
}
UNKNOWN = {**A100, "name": "NVIDIA A30X", "MultiProcessorCount": 56, "L2CacheSize": 25165824}


@pytest.fixture
def cupy(monkeypatch):
    """Puts a CuPy with the given devices in place of the real one."""

    def install(*devices, current=0, is_hip=False, broken=None):
        def getDeviceCount():
            if broken:
                raise broken
            return len(devices)

        runtime = SimpleNamespace(
            is_hip=is_hip,
            getDeviceCount=getDeviceCount,
            getDevice=lambda: current,
            getDeviceProperties=lambda ordinal: {
                "name": devices[ordinal]["name"].encode(),
                "major": devices[ordinal]["cc"][0],
                "minor": devices[ordinal]["cc"][1],
            },
        )
        attributes = [{key: value for key, value in each.items() if key not in ("name", "cc")} for each in devices]
        module = ModuleType("cupy")
        module.cuda = SimpleNamespace(runtime=runtime, Device=lambda ordinal: SimpleNamespace(attributes=attributes[ordinal]))
        monkeypatch.setitem(sys.modules, "cupy", module)

    return install


def test_current_agrees_with_the_catalogue(cupy):
    cupy(A100)
    assert Device.current() == replace(Device.named("A100-40GB"), name="NVIDIA A100-SXM4-40GB")


def test_current_reads_every_figure_from_the_device(cupy):
    odd = dict(zip([key for key in A100 if key not in ("name", "cc")], range(1000, 1008), strict=True))
    cupy({"name": "Odd", "cc": (8, 0), **odd})
    # kHz x 1000 x 2 transfers x bits / 8
    assert Device.current() == Device("Odd", (8, 0), 1001, 1002, 1003, 1004, 1005, 1006 * 1000 * 2 * 1007 / 8, {})


def test_current_takes_the_current_device_or_the_one_asked_for(cupy):
    cupy(A100, UNKNOWN, current=1)
    assert [Device.current(which).name for which in (None, 0, 1)] == ["NVIDIA A30X", A100["name"], "NVIDIA A30X"]
    for ordinal in (-1, 2):
        with pytest.raises(ValueError, match=f"ordinal = {ordinal}: allowed are 0 to 1"):
            Device.current(ordinal)


@pytest.mark.parametrize("silent", [{"MemoryClockRate": 0}, {"MemoryClockRate": None}, {"GlobalMemoryBusWidth": None}])
def test_bandwidth_that_the_driver_does_not_tell(cupy, silent):
    def without(device):
        return {key: value for key, value in {**device, **silent}.items() if value is not None}

    cupy(without(A100), without(UNKNOWN))
    assert Device.current(0).hbm_bandwidth == Device.named("A100-40GB").hbm_bandwidth
    assert Device.current(1).hbm_bandwidth is None


@pytest.mark.parametrize(
    "change",
    [
        {"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MultiProcessorCount": 14},
        {"MultiProcessorCount": 14},
        {"cc": (8, 6)},
        {"name": "NVIDIA H200 NVL"},
        {"name": "NVIDIA A10G"},
    ],
)
def test_peaks_are_not_borrowed_from_a_device_that_only_resembles(cupy, change):
    cupy({**A100, **change})
    assert not Device.current().tensor_peak


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"is_hip": True}, "ROCm"),
        ({"broken": RuntimeError("cudaErrorInsufficientDriver")}, "no GPU.*cudaErrorInsufficientDriver"),
        ({}, "no GPU"),
    ],
)
def test_no_usable_gpu(cupy, state, message):
    cupy(**state)
    with pytest.raises(RuntimeError, match=message):
        Device.current()


def test_no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"pip install 'cupyflash\[cuda13\]'"):
        Device.current()


def test_the_attribute_names_are_those_of_the_installed_cupy():
    runtime = pytest.importorskip("cupy").cuda.runtime
    for key in set(A100) - {"name", "cc"}:
        assert hasattr(runtime, f"cudaDevAttr{key}")


def test_import_and_catalogue_load_no_cupy():
    code = "import sys; from cupyflash.device import Device; Device.named('H200', '8KB');assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
