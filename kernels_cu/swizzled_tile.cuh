// Tiles in shared memory with nothing between their rows: WIDTH elements padded with zeros to a multiple of STEP, their
// 16-byte chunks permuted within each row so that eight rows' chunks of one column lie in different banks.
// Constants: COPY_BYTES (width of one copy between HBM and SRAM), SCARCE (not 0 where registers are), ELEMENT (element.cuh).
#pragma once
#include "tile_copy.cuh"

template <int WIDTH, typename T = Element, int STEP = 16> struct SwizzledTile {
  typedef T Type;
  static constexpr int PAD = (WIDTH + STEP - 1) / STEP * STEP, ROW_BYTES = PAD * sizeof(Element), CHUNKS = ROW_BYTES / 16;
  // Chunks that are permuted among each other. Every 8 / GROUP rows begin in the same bank, so they need no permutation.
  static constexpr int GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;

  // A chunk c of a row lies where chunk c ^ permutation(row) would; eight rows on it is the same. Pairs of floats are stored by
  // half a warp at a time, four rows of two chunks: their permutations differ in more than the lowest bit.
  static __device__ __forceinline__ constexpr int permutation(int row) {
    const int place = row / (8 / GROUP) % GROUP;
    return sizeof(Element) == 4 ? place * 2 % GROUP + place * 2 / GROUP : place;
  }

  // Where element (row, col) lies, in elements from the tile's beginning (which is aligned to 128 bytes)
  static __device__ __forceinline__ constexpr int index(int row, int col) {
    constexpr int CHUNK = 16 / sizeof(Element);
    return row * PAD + ((col / CHUNK) ^ permutation(row)) * CHUNK + col % CHUNK;
  }

  // The address `chunks` chunks to the right of `at`, which is in a column below `chunks` that no bit of it is set in.
  static __device__ __forceinline__ unsigned right(unsigned at, int chunks) {
    return (at ^ (chunks % GROUP * 16)) + chunks / GROUP * GROUP * 16;
  }

  // Starts the copies of a tile of ROWS rows by THREADS threads, of which this is `thread`. Unless it is WHOLE, rows from
  // `valid` on are not read: they become zeros, as does the padding of WIDTH.
  //   tile_smem (ROWS x PAD), tile_gmem (valid x WIDTH, row_stride elements apart)
  template <int ROWS, int THREADS, bool WHOLE>
  static __device__ __forceinline__ void load(Element* tile_smem, const Element* tile_gmem, long long row_stride, int valid,
                                              int thread) {
    load_from<ROWS, THREADS, WHOLE>(tile_smem, tile_gmem + begin<THREADS>(row_stride, thread), tile_gmem, row_stride, valid, thread);
  }

  // Where in a tile a thread's copies begin, in elements
  template <int THREADS> static __device__ __forceinline__ long long begin(long long row_stride, int thread) {
    return thread / side_by_side(THREADS) * row_stride + thread % side_by_side(THREADS) * COPY;
  }

  // The same for one who knows where that is; `anywhere` can be read.
  template <int ROWS, int THREADS, bool WHOLE>
  static __device__ __forceinline__ void load_from(Element* tile_smem, const Element* from, const Element* anywhere,
                                                   long long row_stride, int valid, int thread) {
    const long long step = rows_at_once(THREADS) * row_stride;
    load_rows<ROWS, THREADS, WHOLE, false>(tile_smem, from, anywhere, step, valid, thread, true);
  }

  // The same from the last rows to the first, of tiles that come in this order, too: one pointer and one step go through all.
  // `from` is where the last of the thread's rows begin (`last_rows` beyond `begin`), and becomes that in the tile before. A tile that
  // is not `wanted` is passed over.
  template <int ROWS, int THREADS, bool WHOLE>
  static __device__ __forceinline__ void load_back(unsigned tile_at, const Element*& from, const Element* anywhere,
                                                   long long row_stride, int valid, int thread, bool wanted) {
    const long long step = -rows_at_once(THREADS) * row_stride;
    load_rows<ROWS, THREADS, WHOLE, true>(tile_at, from, anywhere, step, valid, thread, wanted);
    from += (last_rows(ROWS, THREADS) + rows_at_once(THREADS) - ROWS) * row_stride;  // 0 where all threads have rows in each turn
  }
  static __device__ constexpr int last_rows(int rows, int threads) {
    return (rows - 1) / rows_at_once(threads) * rows_at_once(threads);
  }

  // Starts the copies of ROWS rows that each have a place of their own, `row_at(row)`; those from `valid` on become zeros.
  template <int ROWS, int THREADS, class RowAt>
  static __device__ __forceinline__ void gather(Element* tile_smem, RowAt row_at, const Element* anywhere, int valid, int thread) {
    constexpr int WIDE = side_by_side(THREADS), ROWS_AT_ONCE = rows_at_once(THREADS);
#pragma unroll 1
    for (int row = thread / WIDE; row < ROWS; row += ROWS_AT_ONCE) {
      const Element* from = row < valid ? row_at(row) : anywhere;
#pragma unroll 1
      for (int col = thread % WIDE * COPY; col < PAD; col += WIDE * COPY) {
        const bool inside = row < valid && (PAD == WIDTH || col < WIDTH);
        copy_chunk(tile_smem + index(row, col), inside ? from + col : anywhere, inside);
      }
    }
  }

  // Writes rows `first` to `end` - 1 of a tile to HBM, each to a place of its own.
  template <int THREADS, class RowAt>
  static __device__ __forceinline__ void scatter(RowAt row_at, const Element* tile_smem, int first, int end, int thread) {
    constexpr int WIDE = side_by_side(THREADS), ROWS_AT_ONCE = rows_at_once(THREADS);
    for (int row = first + thread / WIDE; row < end; row += ROWS_AT_ONCE) {
      Element* to = row_at(row);
      for (int col = thread % WIDE * COPY; col < WIDTH; col += WIDE * COPY) store_chunk(to + col, tile_smem + index(row, col));
    }
  }

  // Writes the first `valid` rows of a tile to HBM, by the lanes of a warp.
  //   tile_smem (valid x PAD), tile_gmem (valid x WIDTH, row_stride elements apart)
  template <int ROWS>
  static __device__ __forceinline__ void store(Element* tile_gmem, const Element* tile_smem, long long row_stride, int valid,
                                               int lane) {
    constexpr int WIDE = side_by_side(32);
    for (int row = lane / WIDE; row < min(ROWS, valid); row += 32 / WIDE)
      for (int col = lane % WIDE * COPY; col < WIDTH; col += WIDE * COPY)
        store_chunk(tile_gmem + row * row_stride + col, tile_smem + index(row, col));
  }

 private:
  static constexpr int COPY = COPY_BYTES / sizeof(Element), COPIES = PAD / COPY;

  // How many of the threads lie along a row: a power of two that divides a row and the threads. 128 bytes are enough for all
  // banks; more leave fewer than 8 rows at once, which are then not permuted alike.
  static __device__ constexpr int side_by_side(int threads) {
    const int along = COPIES & -COPIES, power = threads & -threads, banks = 128 / COPY_BYTES;
    const int most = power / 8 > banks ? power / 8 : banks < power ? banks : power;
    return along < most ? along : most;
  }
  static __device__ constexpr int rows_at_once(int threads) { return threads / side_by_side(threads); }

  // Some elements beyond a place in shared memory, and the start of a copy to it
  static __device__ __forceinline__ Element* beyond(Element* at, int elements) { return at + elements; }
  static __device__ __forceinline__ unsigned beyond(unsigned at, int elements) { return at + elements * int(sizeof(Element)); }
  static __device__ __forceinline__ void copy(Element* to, const Element* from, bool inside, bool) { copy_chunk(to, from, inside); }
  static __device__ __forceinline__ void copy(unsigned to, const Element* from, bool inside, bool wanted) {
    copy_chunk(to, from, inside, wanted);
  }

  // A thread's copies, `step` elements from those of some rows to those of the next, or, BACK, of the ones before. `tile` is a pointer,
  // or, BACK, an address of shared memory.
  template <int ROWS, int THREADS, bool WHOLE, bool BACK, class Place>
  static __device__ __forceinline__ void load_rows(Place tile, const Element*& from, const Element* anywhere, long long step, int valid,
                                                   int thread, bool wanted) {
    // A thread keeps to its columns and, where 8 rows or more are copied at once, to rows that are permuted alike.
    constexpr int WIDE = side_by_side(THREADS), ROWS_AT_ONCE = rows_at_once(THREADS), LAST = last_rows(ROWS, THREADS);
    const int col0 = thread % WIDE * COPY, row0 = thread / WIDE;
    // Narrow copies are too many to have all their addresses in registers.
    constexpr bool MANY = PAD / (WIDE * COPY) * ROWS / ROWS_AT_ONCE > (SCARCE ? 8 : 32);
    // Then all of its places follow from the first by constants.
    constexpr bool ALIKE = ROWS_AT_ONCE % 8 == 0 && (WIDE * COPY == PAD || WIDE * COPY * sizeof(Element) % (16 * GROUP) == 0);
    const int place = BACK ? index(row0, col0) : unknown(index(row0, col0));
    // ptxas would otherwise keep its sums with constants through the forward's loop.
    const Place first = BACK ? unknown(beyond(tile, place)) : beyond(tile, place);
    // In the forward one that may be short comes before all others: a loop is quick to compile.
#pragma unroll(MANY || (BACK && !WHOLE) ? 1 : ROWS)
    for (int turn = 0; turn <= LAST; turn += ROWS_AT_ONCE) {
      const int r = BACK ? LAST - turn : turn, row = row0 + r;
      if (ROWS % ROWS_AT_ONCE == 0 || row < ROWS) {
#pragma unroll(MANY ? 4 : PAD)
        for (int c = 0; c < PAD; c += WIDE * COPY) {
          const bool inside = (WHOLE || row < valid) && (PAD == WIDTH || col0 + c < WIDTH);
          const Place to = ALIKE ? beyond(first, r * PAD + c) : beyond(tile, index(row, col0 + c));
          copy(to, inside ? from + c : anywhere, inside, wanted);
        }
      }
      from = BACK ? unknown(from + step) : from + step;
    }
  }
};
