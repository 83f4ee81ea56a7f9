// What one bulk tensor copy (TMA) moves, as the driver encodes it: opaque, and taken by the address that it has in the kernel's
// parameters. A map's place is a multiple of 128 bytes there, so maps come first in the struct.
#pragma once

struct alignas(128) TensorMap {
  unsigned long long words[16];
};
