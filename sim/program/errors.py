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


SPECIAL = {
    "SUCCESS": ("cudaSuccess", "no error"),
    "MEMORY_ALLOCATION": ("cudaErrorMemoryAllocation", "out of memory"),
    "INVALID_VALUE": ("cudaErrorInvalidValue", "invalid argument"),
    "INVALID_CONFIGURATION": ("cudaErrorInvalidConfiguration", "invalid configuration argument"),
    "INVALID_SYMBOL": ("cudaErrorInvalidSymbol", "invalid device symbol"),
    "INVALID_DEVICE": ("cudaErrorInvalidDevice", "invalid device ordinal"),
    "INVALID_FILTER_SETTING": ("cudaErrorInvalidFilterSetting", "linear filtering not supported for non-float type"),
    "INVALID_NORM_SETTING": ("cudaErrorInvalidNormSetting", "read as normalized float not supported for 32-bit non float type"),
    "NO_DEVICE": ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    "ILLEGAL_ADDRESS": ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    "ASSERT": ("cudaErrorAssert", "device-side assert triggered"),
    "LAUNCH_FAILURE": ("cudaErrorLaunchFailure", "unspecified launch failure"),
    "LAUNCH_TIMEOUT": ("cudaErrorLaunchTimeout", "the launch timed out and was terminated"),
    "LAUNCH_OUT_OF_RESOURCES": ("cudaErrorLaunchOutOfResources", "too many resources requested for launch"),
    "NOT_SUPPORTED": ("cudaErrorNotSupported", "operation not supported"),
    "INVALID_KERNEL_IMAGE": ("cudaErrorInvalidKernelImage", "device kernel image is invalid"),
}


def name_of(code: int) -> str:
    """Returns an error's name, such as cudaErrorInvalidValue."""
    known = ErrorCode(code).name if code in ErrorCode._value2member_map_ else "UNKNOWN"
    return SPECIAL[known][0] if known in SPECIAL else "cudaError" + known.title().replace("_", "")


def text_of(code: int) -> str:
    """Returns an error's text, such as "invalid argument"."""
    known = ErrorCode(code).name if code in ErrorCode._value2member_map_ else "UNKNOWN"
    return SPECIAL[known][1] if known in SPECIAL else known.lower().replace("_", " ")


class CudaError(Exception):
    """Raised where a runtime function returns an error; `why` is for the report."""

    def __init__(self, code: ErrorCode, why: str = ""):
        self.code, self.why = code, why
        super().__init__(f"{name_of(code)}{f': {why}' if why else ''}")
