// Decoding: few rows of Q against a long cache of K and V, as Flash-Decoding has it. One thread block has all rows that read one key
// head (those of its group of query heads, and of all queries) and a part of the keys, a split; K and V are read once. Where there
// are several splits, each writes its O, m and l, and `merge_splits` makes one result of them.
//
// Row r of a tile is query r / PACK of the group's head r % PACK. The keys of a block are shared out among KEY_WARPS warps, each with
// an O, m and l of its own, joined at the end.
//
// Constants, all from the tile schedule:
//   ELEMENT     __half, __nv_bfloat16 or float       HEAD_DIM, VALUE_DIM  d of Q and K, of V and O
//   PACK        query heads of a key head            BC          keys of a block
//   ROW_TILES   tiles of 16 rows that a warp has     ROW_WARPS, KEY_WARPS  warps that share out rows, and a block's keys
//   STAGES      slots of the ring, a K and a V block each, of which all but one are being filled
//   SPLIT       whether there are several splits     PAGE        keys of a page, 0 where the cache has none
//   APPEND      whether there are new keys, which belong behind the cached ones
//   TREE        whether a mask says which of the newest keys a query sees
//   SCALE_FIRST whether S is scaled before its maximum is taken: with a score function, or a scale that is not positive
//   PADDED      whether sequences have lengths; else all keys are cached     COPY_BYTES   width of a copy
//   CAUSAL, WINDOW, MASK, SINKS  mask.cuh, mask_function.cuh (a function, asked for every score that position leaves), sinks.cuh
#define SUB (BC / KEY_WARPS)
constexpr int SCARCE = VALUE_DIM > 128 ? 4 : 0;
#include "element.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "row_pair.cuh"
#include "row_products.cuh"
#include "sinks.cuh"

constexpr int WARPS = ROW_WARPS * KEY_WARPS, THREADS = 32 * WARPS;
constexpr int M = ROW_TILES, N = SUB / 8;  // tensor core tiles of a warp's part of S
constexpr int BR = 16 * M * ROW_WARPS;     // rows of a tile

typedef SwizzledTile<HEAD_DIM> KeyTile;     // of Q and K
typedef SwizzledTile<VALUE_DIM> ValueTile;  // of V and O
constexpr int C = ValueTile::PAD / 8;       // tensor core tiles of a warp's columns of O
#include "online_softmax.cuh"

constexpr int SLOT = BC * (KeyTile::PAD + ValueTile::PAD);  // elements
constexpr bool Q_IN_REGS = M == 1 && HEAD_DIM <= 128 && VALUE_DIM <= 128;
constexpr int PART_WIDTH = (VALUE_DIM + 3) / 4 * 4;  // floats of a row of a split's O
// Pages whose places are known at a time; a warp's lanes look up so many at once.
constexpr int KNOWN_PAGES = 128, LOOKED_UP = 32;
__device__ constexpr int together(int a, int b) { return b == 0 ? a : together(b, a % b); }  // the greatest common divisor

// A sequence's keys, and which of them a row tile's rows see
struct Keys {
  int batch, kv_head, tile;
  int cached, all;  // without the new ones, and with them
  Masks masks;
  const unsigned char* tree;   // of the newest keys, as many as queries: nonzero where a query sees one
  int first, end;              // blocks that some row sees, or that hold what this tile's thread blocks append
  int whole_begin, whole_end;  // blocks that every row sees
  bool appends;

  // Which blocks split `s` has: as many as any other, or one fewer. Where blocks are fewer than splits, the last splits have none.
  __device__ __forceinline__ int splits(const Params& p) const { return min(p.splits, max(end - first, 0)); }
  __device__ __forceinline__ int begin_of(const Params& p, int s) const {
    return first + static_cast<int>(static_cast<long long>(end - first) * s / max(splits(p), 1));
  }
};

__device__ __forceinline__ Keys keys_of(const Params& p, int batch, int kv_head, int tile, int cached) {
  Keys keys = {batch, kv_head, tile};
  keys.cached = max(0, min(p.Nk - p.appended, cached));
  keys.all = keys.cached + p.appended;
  keys.masks = masks_of(p, batch, 0, p.Nq, keys.all, keys.all);
  keys.tree = p.tree_mask.of(batch, 0);
  const int rows = p.Nq * PACK, query = tile * BR / PACK, last_query = (min((tile + 1) * BR, rows) - 1) / PACK;
  int begin = visible_begin(keys.masks, query);
  const int end = visible_end(keys.masks, last_query);
  keys.whole_begin = (visible_begin(keys.masks, last_query) + BC - 1) / BC;
  keys.whole_end = visible_end(keys.masks, query) / BC;
  if (TREE) keys.whole_end = min(keys.whole_end, max(0, keys.all - p.Nq) / BC);
  // The last row sees the last key, so that what this tile does not see of the new ones is before.
  keys.appends = APPEND && tile == p.row_tiles - 1;
  if (keys.appends) begin = min(begin, keys.cached);
  keys.first = begin < end ? begin / BC : 0;
  keys.end = begin < end ? (end + BC - 1) / BC : 0;
  return keys;
}

// Where in the cache a key is: of which page, or sequence, which row
struct Place {
  int page, row;
  template <typename T> __device__ __forceinline__ T* of(const Rows<T>& cache, int kv_head) const {
    return cache.of(page, kv_head) + row * cache.row;
  }
};

// The blocks of a split, through a ring of slots for a K_j and its V_j each
struct Stream {
  const Params& p;
  const Keys& keys;
  Element* ring;
  int* pages;  // page x of the sequence is which, at x % KNOWN_PAGES
  int end;     // of the split's blocks
  int looked;  // pages from this one on have yet to be looked up

  static constexpr int TOGETHER = PAGE ? together(PAGE, BC) : BC;  // keys of a block that are of one page, at least

  __device__ __forceinline__ Element* K_smem(int slot) const { return ring + slot * SLOT; }
  __device__ __forceinline__ Element* V_smem(int slot) const { return ring + slot * SLOT + BC * KeyTile::PAD; }

  // The pages that hold keys before `key`, and some more, each once. A bad one is taken for the first or the last.
  __device__ __forceinline__ void look_up(int key) {
    if constexpr (PAGE) {
      const int wanted = (min(key, keys.all) + PAGE - 1) / PAGE, there = (min(end * BC, keys.all) + PAGE - 1) / PAGE;
      for (; looked < wanted; looked += LOOKED_UP) {
        const int page = looked + static_cast<int>(threadIdx.x);
        if (threadIdx.x < LOOKED_UP && page < there) {
          const int found = p.block_table[static_cast<long long>(keys.batch) * p.table_row + page];
          pages[page % KNOWN_PAGES] = max(0, min(found, p.pages - 1));
        }
      }
    }
  }

  __device__ __forceinline__ void fetch(int j, int slot) const {
    if (j >= end) return;
    if ((j + 1) * BC <= keys.cached) {
#pragma unroll
      for (int k = 0; k < BC; k += TOGETHER) {
        const Place at = place(j * BC + k);
        KeyTile::template load<TOGETHER, THREADS, true>(K_smem(slot) + k * KeyTile::PAD, at.of(p.K, keys.kv_head), p.K.row, TOGETHER,
                                                        threadIdx.x);
        ValueTile::template load<TOGETHER, THREADS, true>(V_smem(slot) + k * ValueTile::PAD, at.of(p.V, keys.kv_head), p.V.row, TOGETHER,
                                                          threadIdx.x);
      }
    } else {
      gather<KeyTile>(j, K_smem(slot), p.K, p.K_new);
      gather<ValueTile>(j, V_smem(slot), p.V, p.V_new);
    }
  }

  // The new rows of block j, which is in SRAM, to the cache
  __device__ __forceinline__ void append(int j, int slot) const {
    const int first = max(keys.cached - j * BC, 0), behind = min(keys.all - j * BC, BC);
    auto key = [&](int row) { return place(j * BC + row).of(p.K, keys.kv_head); };
    auto value = [&](int row) { return place(j * BC + row).of(p.V, keys.kv_head); };
    KeyTile::template scatter<THREADS>(key, K_smem(slot), first, behind, threadIdx.x);
    ValueTile::template scatter<THREADS>(value, V_smem(slot), first, behind, threadIdx.x);
  }

 private:
  __device__ __forceinline__ Place place(int key) const {
    if constexpr (PAGE) return {pages[key / PAGE % KNOWN_PAGES], key % PAGE};
    return {keys.batch, key};
  }

  // A block that ends behind what was cached, row by row: new rows are read where they come from
  template <class Tile>
  __device__ __forceinline__ void gather(int j, Element* to, const Rows<Element>& cache, const Rows<const Element>& added) const {
    auto row_at = [&](int row) -> const Element* {
      const int key = j * BC + row;
      if (APPEND && key >= keys.cached) return added.of(keys.batch, keys.kv_head) + (key - keys.cached) * added.row;
      return place(key).of(cache, keys.kv_head);
    };
    Tile::template gather<BC, THREADS>(to, row_at, cache.at, keys.all - j * BC, threadIdx.x);
  }
};

// Scores of rows row0 + 8 h and columns from col0 on, where they are scaled before their maximum is taken: what the score function, if
// there is one, makes of them, as exponents of two. Where that reads something, it is of scores only that position lets a row see.
//   heads: of the first of the rows
__device__ __forceinline__ void scale_scores(float (&S)[N][4], const Params& p, const Keys& keys, const PartOfHead* heads, int row0,
                                             int col0) {
  const int first = col0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + 8 * h, query = row / PACK, head = keys.kv_head * PACK + row % PACK;
    const int begin = visible_begin(keys.masks, query), end = query < p.Nq ? visible_end(keys.masks, query) : 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int key = first + 8 * n + e;
        const bool wanted = !SCORE_LOADS || (key < end && (!WINDOW || key >= begin));
        float& s = S[n][2 * h + e];
        if constexpr (SCORE) {
          const PartOfHead of_head = OF_HEAD ? heads[8 * h] : PartOfHead();
          const ScoreAt at = {keys.batch, head, query, key, p.Nq, keys.all};
          if (wanted) s = LOG2_E * score_of(p, of_head, {}, {}, __fmul_rn(s, p.scale), at).value;
        } else {
          s = __fmul_rn(s, p.scale_log2);
        }
      }
  }
}

// Scores of rows row0 + 8 h and columns from col0 on: -inf where a row does not see the key
//   heads: of the first of the rows
__device__ __forceinline__ void mask_scores(float (&S)[N][4], const Params& p, const Keys& keys, const PartOfHead* heads, int row0,
                                            int col0) {
  const int first = col0 + threadIdx.x % 4 * 2, newest = keys.all - p.Nq;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = row0 + 8 * h, query = row / PACK;
    const int begin = visible_begin(keys.masks, query), end = query < p.Nq ? visible_end(keys.masks, query) : 0;
    const unsigned char* tree = keys.tree + query * p.tree_mask.row;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int col = first + 8 * n + e;
        const bool there = col < end && (!WINDOW || col >= begin);
        bool seen = there;
        if (TREE && seen && col >= newest) seen = load_in_place(tree + (col - newest) * p.tree_mask.col);
        if constexpr (MASK) {  // also of what the tree leaves out, so that what is read follows from the lengths
          const PartOfHead of_head = OF_HEAD ? heads[8 * h] : PartOfHead();
          if (there) seen &= mask_holds(p, of_head, {}, {}, {keys.batch, keys.kv_head * PACK + row % PACK, query, col, p.Nq, keys.all});
        }
        if (!seen) S[n][2 * h + e] = NEG_INF;
      }
  }
}

// O, m and l of the warps that have the same rows and other keys, joined in the first of them. `parts` has room for them all.
__device__ __forceinline__ void join_key_warps(State& state, float factor, float4* parts, int row_warp, int key_warp) {
  constexpr int TILES = ValueTile::PAD / 8, PART = 32 * M * (TILES + 1);
  float4* part = parts + ((key_warp - 1) * ROW_WARPS + row_warp) * PART + threadIdx.x % 32;
  if (key_warp > 0) {
#pragma unroll
    for (int i = 0; i < M; i++) {
#pragma unroll
      for (int n = 0; n < TILES; n++)
        part[32 * (i * (TILES + 1) + n)] = make_float4(state.O[i][n][0], state.O[i][n][1], state.O[i][n][2], state.O[i][n][3]);
      part[32 * (i * (TILES + 1) + TILES)] = make_float4(state.minus_m[i][0], state.minus_m[i][1], state.l[i][0], state.l[i][1]);
    }
  }
  __syncthreads();
  if (key_warp > 0) return;
  for (int w = 1; w < KEY_WARPS; w++, part += ROW_WARPS * PART) {
    const float4* other = part + ROW_WARPS * PART;
#pragma unroll
    for (int i = 0; i < M; i++) {
      const float4 rows = other[32 * (i * (TILES + 1) + TILES)];
      const float minus_m[2] = {rows.x, rows.y}, l[2] = {rows.z, rows.w};
      float own[2], theirs[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float m = -state.minus_m[i][h], m_new = fmaxf(m, -minus_m[h]);
        const Origin now = origin_of(m_new, factor);
        own[h] = weight_kept(m, now, factor), theirs[h] = weight_kept(-minus_m[h], now, factor);
        state.minus_m[i][h] = -m_new;
        state.l[i][h] = state.l[i][h] * own[h] + l[h] * theirs[h];
      }
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const float4 O = other[32 * (i * (TILES + 1) + n)];
        float(&to)[4] = state.O[i][n];
        to[0] = to[0] * own[0] + O.x * theirs[0];
        to[1] = to[1] * own[0] + O.y * theirs[0];
        to[2] = to[2] * own[1] + O.z * theirs[1];
        to[3] = to[3] * own[1] + O.w * theirs[1];
      }
    }
  }
}

// A row's natural log-sum-exp, from what m and l have come to
__device__ __forceinline__ float log_sum_exp(const Params& p, float m, float l, float factor) {
  const Origin origin = origin_of(m, factor);
  return (SCALE_FIRST ? LN_2 : p.scale) * origin.score + LN_2 * (log2f(l) - origin.offset);
}

// The results of a warp's rows: O and L, or a split's O, m and l. Every row's lanes write what they hold.
__device__ __forceinline__ void write_rows(State& state, const Params& p, const Keys& keys, int split, int row0, float factor) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = row0 + 16 * i + 8 * h, query = row / PACK, head = keys.kv_head * PACK + row % PACK;
      const bool there = query < p.Nq;
      const float m = -state.minus_m[i][h], l = state.l[i][h];
      float by = l == 0.f ? 0.f : 1.f / l;
      const long long L_row = (static_cast<long long>(keys.batch) * p.heads + head) * p.Nq + query;
      const long long part = split * static_cast<long long>(p.rows) + L_row;
      if constexpr (!SPLIT) {
        float L = log_sum_exp(p, m, l, factor);
        by *= join_sink(L, sink_of(p, head, there));
        if (there && p.L && t == 0) p.L[L_row] = L;
      } else if (there && t == 0) {
        p.m_part[part] = m, p.l_part[part] = l;
      }
      Element* O = p.O.of(keys.batch, head) + query * p.O.row;
#pragma unroll
      for (int n = 0; n < ValueTile::PAD / 8; n++) {
        if (!there) break;
        const float x = state.O[i][n][2 * h] * by, y = state.O[i][n][2 * h + 1] * by;
        if constexpr (SPLIT) {
          store_row_pair<PART_WIDTH>(p.O_part + part * PART_WIDTH, 8 * n + 2 * t, x, y);
        } else {
          store_row_pair<VALUE_DIM>(O, 8 * n + 2 * t, x, y);
        }
      }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ __align__(128) unsigned char sram[];
  Element* Q_smem = reinterpret_cast<Element*>(sram);           // (BR x d)
  Element* ring = Q_smem + BR * KeyTile::PAD;                   // STAGES x (BC x d and BC x d_v)
  int* scratch = reinterpret_cast<int*>(ring + STAGES * SLOT);  // the sequence's length, then its pages
  PartOfHead* heads = reinterpret_cast<PartOfHead*>(scratch + KNOWN_PAGES);  // of the tile's rows

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_warp = warp % ROW_WARPS, key_warp = warp / ROW_WARPS;
  const int split = blockIdx.x % p.splits, tile = blockIdx.x / p.splits % p.row_tiles;
  const int pair = blockIdx.x / p.splits / p.row_tiles, kv_heads = p.heads / PACK;
  if (threadIdx.x == 0) *scratch = PADDED ? p.cache_seqlens[pair / kv_heads] : p.Nk;
  __syncthreads();
  const Keys keys = keys_of(p, pair / kv_heads, pair % kv_heads, tile, *scratch);
  if (SPLIT && split >= keys.splits(p)) return;
  const int begin = keys.begin_of(p, split), end = SPLIT ? keys.begin_of(p, split + 1) : keys.end;
  __syncthreads();  // the length's place becomes a page's

  Stream stream = {p, keys, ring, scratch, end, PAGE ? begin * BC / PAGE : 0};
  stream.look_up((begin + STAGES) * BC);
  if (PAGE) __syncthreads();
  if (begin < end) {
    auto query = [&](int row) {
      const int r = tile * BR + row;
      return p.Q.of(keys.batch, keys.kv_head * PACK + r % PACK) + r / PACK * p.Q.row;
    };
    KeyTile::template gather<BR, THREADS>(Q_smem, query, p.Q.at, p.Nq * PACK - tile * BR, threadIdx.x);
    if constexpr (OF_HEAD) {
      for (int row = threadIdx.x; row < BR; row += THREADS) {
        const int r = tile * BR + row;
        heads[row] = r < p.Nq * PACK ? read_of_head(p, {keys.batch, keys.kv_head * PACK + r % PACK, 0, 0, p.Nq, keys.all}) : PartOfHead();
      }
    }
  }
#pragma unroll 1
  for (int s = 0; s < STAGES - 1; s++) {
    stream.fetch(begin + s, s);
    close_group();
  }

  State state = {};
#pragma unroll
  for (int i = 0; i < M; i++) state.minus_m[i][0] = state.minus_m[i][1] = -NEG_INF;
  const float factor = SCALE_FIRST ? 1.f : p.scale_log2;
  const int row0 = tile * BR + row_warp * 16 * M + lane / 4;
  const PartOfHead* own_heads = heads + row0 - tile * BR;
  QueryRows<KeyTile, M, Q_IN_REGS> Q_rows;
  Q_rows.smem = Q_smem + row_warp * 16 * M * KeyTile::PAD;
  const unsigned at_keys = place_of_keys<KeyTile>();

  for (int j = begin, slot = 0; j < end; j++) {
    if constexpr (STAGES == 1) {
      stream.fetch(j, 0);
      close_group();
    }
    wait_for_groups<(STAGES > 1 ? STAGES - 2 : 0)>();
    __syncthreads();
    if constexpr (STAGES > 1) {
      stream.fetch(j + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
      close_group();
    }
    stream.look_up((j + STAGES + 1) * BC);
    if (Q_IN_REGS && j == begin) Q_rows.keep();
    if (keys.appends && (j + 1) * BC > keys.cached) stream.append(j, slot);

    const Element* K_smem = stream.K_smem(slot) + key_warp * SUB * KeyTile::PAD;
    const Element* V_smem = stream.V_smem(slot) + key_warp * SUB * ValueTile::PAD;
    float S[M][N][4], offset[M][2];
    scores(S, Q_rows, K_smem, at_keys);
    auto mask = [&](float (&S)[M][N][4]) {
#pragma unroll
      for (int i = 0; i < M; i++) mask_scores(S[i], p, keys, own_heads + 16 * i, row0 + 16 * i, j * BC + key_warp * SUB);
    };
    if constexpr (SCALE_FIRST) {
#pragma unroll
      for (int i = 0; i < M; i++)
        scale_scores(S[i], p, keys, own_heads + 16 * i, row0 + 16 * i, j * BC + key_warp * SUB);
    }
    rescale(S, state, factor, offset, MASK || j < keys.whole_begin || j >= keys.whole_end, mask);
    weigh_tile(S, state, factor, offset);
    if constexpr (SCARCE > 0) {
      add_weighted_values<ValueTile>(state.O, S, V_smem);  // fewer registers
    } else {
      add_tile_of_values<ValueTile>(state.O, S, shared_address(V_smem));
    }
    if (STAGES == 1) __syncthreads();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  wait_for_groups<0>();
#pragma unroll
  for (int i = 0; i < M; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) state.l[i][h] = row_sum(state.l[i][h]);
  if constexpr (KEY_WARPS > 1) {
    __syncthreads();
    join_key_warps(state, factor, reinterpret_cast<float4*>(ring), row_warp, key_warp);
    if (key_warp > 0) return;
  }
  write_rows(state, p, keys, split, row0, factor);
}

// O = sum of the splits' weights times their O, L = log of the sum of exponentials of all. A thread block has one row; each of its
// warps adds up some of the splits.
constexpr int MERGE_WARPS = 4;
extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS, 8) merge_splits(__grid_constant__ const Params given) {
  const Params p = given;
  __shared__ float weights[MOST_SPLITS], ls[MOST_SPLITS];
  __shared__ __align__(16) float sums[MERGE_WARPS][PART_WIDTH];
  __shared__ int found;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int query = blockIdx.x % p.Nq, pair = blockIdx.x / p.Nq, head = pair % p.heads, batch = pair / p.heads;
  if (threadIdx.x == 0) found = PADDED ? p.cache_seqlens[batch] : p.Nk;
  __syncthreads();
  const int tile = (query * PACK + head % PACK) / BR;
  const Keys keys = keys_of(p, batch, head / PACK, tile, found);
  const int splits = keys.splits(p);
  const float factor = SCALE_FIRST ? 1.f : p.scale_log2;
  const long long row = blockIdx.x;
  if (warp == 0) {
    float m = NEG_INF, l = 0.f;
    for (int s = lane; s < splits; s += 32) {
      weights[s] = p.m_part[s * static_cast<long long>(p.rows) + row];
      ls[s] = p.l_part[s * static_cast<long long>(p.rows) + row];
      m = fmaxf(m, weights[s]);
    }
    for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
    const Origin now = origin_of(m, factor);
    for (int s = lane; s < splits; s += 32) {
      weights[s] = weight_kept(weights[s], now, factor) * ls[s];
      l += weights[s];
    }
    for (int step = 16; step > 0; step /= 2) l += __shfl_xor_sync(~0u, l, step);
    float L = log_sum_exp(p, m, l, factor);
    const float by = (l == 0.f ? 0.f : 1.f / l) * join_sink(L, sink_of<32>(p, head, true));
    for (int s = lane; s < splits; s += 32) weights[s] *= by;
    if (p.L && lane == 0) p.L[row] = L;
  }
  __syncthreads();
  for (int c = 4 * lane; c < PART_WIDTH; c += 128) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int s = warp; s < splits; s += MERGE_WARPS) {
      const float4 O = *reinterpret_cast<const float4*>(p.O_part + (s * static_cast<long long>(p.rows) + row) * PART_WIDTH + c);
      const float weight = weights[s];
      sum.x += weight * O.x, sum.y += weight * O.y, sum.z += weight * O.z, sum.w += weight * O.w;
    }
    *reinterpret_cast<float4*>(sums[warp] + c) = sum;
  }
  __syncthreads();
  Element* O = p.O.of(batch, head) + query * p.O.row;
  for (int c = 2 * threadIdx.x; c < VALUE_DIM; c += 2 * 32 * MERGE_WARPS) {
    float x = 0.f, y = 0.f;
#pragma unroll
    for (int w = 0; w < MERGE_WARPS; w++) x += sums[w][c], y += sums[w][c + 1];
    store_row_pair<VALUE_DIM>(O, c, x, y);
  }
}
