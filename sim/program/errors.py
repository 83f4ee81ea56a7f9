"""Errors of the CUDA runtime: numbers, names and texts, as its reference documents them ("CUDA Runtime API", cudaError_t)."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """Results of runtime functions that the simulator gives."""

    SUCCESS = 0
    INVALID_VALUE = 1
    MEMORY_ALLOCATION = 2
    INVALID_CONFIGURATION = 9
    INVALID_SYMBOL = 13
    INVALID_FILTER_SETTING = 26
    INVALID_NORM_SETTING = 27
    INVALID_DEVICE_FUNCTION = 98
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_KERNEL_IMAGE = 200
    INVALID_RESOURCE_HANDLE = 400
    ILLEGAL_STATE = 401
    SYMBOL_NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_TIMEOUT = 702
    PEER_ACCESS_UNSUPPORTED = 217
    ASSERT = 710
    COOPERATIVE_LAUNCH_TOO_LARGE = 720
    LAUNCH_FAILURE = 719
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    UNKNOWN = 999


TEXTS = {
    ErrorCode.SUCCESS: "no error",
    ErrorCode.MEMORY_ALLOCATION: "out of memory",
    ErrorCode.INVALID_VALUE: "invalid argument",
    ErrorCode.INVALID_CONFIGURATION: "invalid configuration argument",
    ErrorCode.INVALID_SYMBOL: "invalid device symbol",
    ErrorCode.INVALID_DEVICE: "invalid device ordinal",
    ErrorCode.INVALID_FILTER_SETTING: "linear filtering not supported for non-float type",
    ErrorCode.INVALID_NORM_SETTING: "read as normalized float not supported for 32-bit non float type",
    ErrorCode.NO_DEVICE: "no CUDA-capable device is detected",
    ErrorCode.ILLEGAL_ADDRESS: "an illegal memory access was encountered",
    ErrorCode.ASSERT: "device-side assert triggered",
    ErrorCode.LAUNCH_FAILURE: "unspecified launch failure",
    ErrorCode.LAUNCH_TIMEOUT: "the launch timed out and was terminated",
    ErrorCode.LAUNCH_OUT_OF_RESOURCES: "too many resources requested for launch",
    ErrorCode.NOT_SUPPORTED: "operation not supported",
    ErrorCode.INVALID_KERNEL_IMAGE: "device kernel image is invalid",
}
"""Texts of errors that are not their names in words."""


def name_of(code: int) -> str:
    """Returns an error's name, such as cudaErrorInvalidValue."""
    known = known_code(code)
    return "cudaSuccess" if known == ErrorCode.SUCCESS else "cudaError" + known.name.title().replace("_", "")


def text_of(code: int) -> str:
    """Returns an error's text, such as "invalid argument"."""
    known = known_code(code)
    return TEXTS.get(known) or known.name.lower().replace("_", " ")


def known_code(code: int) -> ErrorCode:
    return ErrorCode(code) if code in ErrorCode._value2member_map_ else ErrorCode.UNKNOWN


class CudaError(Exception):
    """Raised where a runtime function returns an error; `why` is for the report."""

    def __init__(self, code: ErrorCode, why: str = ""):
        self.code, self.why = code, why
        super().__init__(f"{name_of(code)}{f': {why}' if why else ''}")
