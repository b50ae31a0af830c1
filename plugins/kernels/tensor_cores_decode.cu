// LoRA of up to 8 rows in one launch on tensor cores, for 16-bit elements. The host has seen to it that x, B, y and
// out are aligned vectors throughout, and A where its rank is a multiple of 8.
//
// The operands of mma.m16n8k16 are swapped: its left one, of 16 rows, is A or B transposed, and its right one,
// of 8 columns, is x or t. So 8 rows of x fill it. An mma may sum up in any order: lane 4 g + t takes 8 neighbours
// of a row of x, and the same rows of A, so that one load is the right operand of two.

constexpr int TILE_SUMS = DECODE_ROWS * RANK_TILE;  // of a rank tile of t, [DECODE_ROWS, RANK_TILE]
constexpr int CHUNK_SIZE = CHUNK * RANK_TILE;       // elements of A
constexpr int HALF = CHUNK_SIZE / 2;

DEVICE int lane_of_thread() { return threadIdx.x % 32; }
DEVICE int warp_of_thread() { return threadIdx.x / 32; }
DEVICE int lane_group() { return threadIdx.x % 32 / 4; }          // g
DEVICE int lane_in_group() { return threadIdx.x % 4; }            // t
DEVICE int output_row(int i) { return 2 * lane_in_group() + i; }  // of an mma's sums, and so of y and out

// Without signs, and in bytes, it is one instruction.
template <class T> DEVICE T* row_of(T* first, int row, int stride) {
  const auto bytes = static_cast<unsigned long long>(unsigned(row)) * (unsigned(stride) * unsigned(sizeof(T)));
  return (T*)((char*)(first) + bytes);
}

DEVICE int site_of_rank_tile(const Group& group, int tile) {
  int site = 0;
#pragma unroll 1
  while (site + 1 < group.sites && group.site[site + 1].rank_tile <= tile) ++site;
  return site;
}

// ---- shrink: t, transposed, [16 ranks, 8 rows] = A, transposed, @ x, transposed

// Which of a power of two of rank tiles is a warp's, and which of `parts` of its k.
struct WarpShare {
  int shift;

  DEVICE explicit WarpShare(int tiles) : shift((tiles > 1) + (tiles > 2) + (tiles > 4)) {}
  DEVICE int tile() const { return warp_of_thread() & (1 << shift) - 1; }
  DEVICE int part() const { return warp_of_thread() >> shift; }
  DEVICE int parts() const { return WARPS >> shift; }
};

// A chunk of A, [CHUNK, RANK_TILE], in shared memory: rows in the order in which mma wants them, and the two vectors of
// a row swapped in every other four, so that eight rows lie in different banks. A lane stages the 16 bytes of its
// number and those 32 behind: one vector of two rows.
DEVICE int staged_row() { return (threadIdx.x >> 2 & 3) * 8 + (threadIdx.x >> 4 & 1) * 2 + (threadIdx.x >> 1 & 1); }
DEVICE int staged_vector() { return (threadIdx.x ^ threadIdx.x >> 3) & 1; }
constexpr int NEXT_ROW = 4;   // from a lane's first row to its second

// The first of the two for which a lane gives the address to load_matrices_across.
DEVICE int loaded_vector() {
  return (((threadIdx.x >> 4 & 1) * 8 + (threadIdx.x & 7)) * 2 + ((threadIdx.x >> 3 ^ threadIdx.x >> 2) & 1)) * 8;
}

// What a lane stages of a rank tile of A: its vector, in rows from `first` on.
template <class T> struct RankVector {
  const T* first;
  int stride;  // of a row
  int valid;  // elements; none behind the last rank, or where there is no tile
  int rows;   // behind them, or without elements, there are zeros

  DEVICE RankVector(const Group& group, int tile, int end) {
    const Site& site = group.site[site_of_rank_tile(group, tile)];
    const Factors<T> factors = factors_of<T>(site);
    const int start = (tile - site.rank_tile) * RANK_TILE + staged_vector() * 8;
    stride = stride_of_a(site);
    first = row_of(factors.a + start, staged_row(), stride);
    valid = tile < group.rank_tiles ? at_most(factors.rank - start, 8) : 0;
    rows = valid > 0 ? end - staged_row() : 0;
    compute_here(first);
    compute_here(rows);
  }
};

// A chunk of a rank tile, staged by its warp, from row k of A on.
template <class T> DEVICE void stage_chunk(T* to, const RankVector<T>& vector, int k) {
  const T* from = row_of(vector.first, k, vector.stride);
  copy16_or_zeros(to, from, k < vector.rows);
  copy16_or_zeros(to + HALF, row_of(from, NEXT_ROW, vector.stride), k < vector.rows - NEXT_ROW);
}

// CHUNKS where the rank is no multiple of 8, as for an adapter's missing sites, of rank 1: element by element, each of
// all rows at once.
template <class T> DEVICE void stage_odd_chunks(T* to, const RankVector<T>& vector, int k, int step) {
#pragma unroll
  for (int i = 0; i < 2 * CHUNKS; ++i) *reinterpret_cast<Pack*>(to + i * HALF) = {};
#pragma unroll 1
  for (int element = 0; element < vector.valid; ++element) {
    T values[2 * CHUNKS];
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; ++i) {
      const int row = k + i / 2 * step + i % 2 * NEXT_ROW;
      values[i] = row < vector.rows ? read(row_of(vector.first, row, vector.stride) + element) : T{};
    }
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; ++i) to[i * HALF + element] = values[i];
  }
}

// sum [4 of 16 ranks x 8 rows] += A, transposed, @ x, transposed, of a chunk: two sums, so that no mma waits.
template <class T> DEVICE void multiply_chunk(float (&sum)[2][4], const T* loaded, const Pack& x) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned a[4];  // 8 x 8 each: ranks from 0 and from 8, then the same of 8 more of k
    load_matrices_across(a, loaded + half * HALF);
    multiply(sum[half], a, x.word[2 * half], x.word[2 * half + 1], T{});
  }
}

// The warp's part of its rank tile of t, to [DECODE_ROWS, RANK_TILE]. Shared memory: CHUNKS for each warp.
template <class T> DEVICE void shrink_rank_tile(const Group& group, Range k, WarpShare share, T* chunks, float* to) {
  const RankVector<T> vector(group, share.tile(), k.end);
  const int row = at_most(lane_group(), group.m - 1);  // behind the last, another: nobody reads its sums
  const T* x = row_of(static_cast<const T*>(group.x), row, group.k) + 8 * lane_in_group();
  int end_of_x = k.end - 8 * lane_in_group(), step = share.parts() * CHUNK;
  chunks += warp_of_thread() * CHUNKS * CHUNK_SIZE;
  T *staged = chunks + lane_of_thread() * 8, *loaded = chunks + loaded_vector();
  compute_here(x);
  compute_here(end_of_x);
  compute_here(step);
  compute_here(staged);
  compute_here(loaded);
  float sum[2][4] = {};
  for (int i = k.first; i < k.end; i += CHUNKS * step) {
    const int first = i + share.part() * CHUNK;
    Pack of_x[CHUNKS];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j)
      of_x[j] = first + j * step < end_of_x ? read16(row_of(x, first + j * step, 1)) : Pack{};
    if (vector.stride % 8u == 0) {
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) stage_chunk(staged + j * CHUNK_SIZE, vector, first + j * step);
    } else {
      stage_odd_chunks(staged, vector, first, step);
    }
    close_copies();
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) multiply_chunk(sum, loaded + j * CHUNK_SIZE, of_x[j]);
    __syncthreads();  // the next chunks, or the sums, overwrite them
  }
#pragma unroll
  for (int part = 0; part < 4; ++part)
    to[output_row(part % 2) * RANK_TILE + part / 2 * 8 + lane_group()] = sum[0][part] + sum[1][part];
}

// ---- t. Each rank tile has a warp that adds it up: a lane has 4 ranks of row g.

// A rank tile of t as two 16-bit numbers each, two to a word; see Block.
struct alignas(16) SplitTile {
  unsigned high[TILE_SUMS / 2];
  unsigned low[TILE_SUMS / 2];
  float scale[DECODE_ROWS];
};

DEVICE void add(Four& sum, const Four& value) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.value[i] += value.value[i];
}

// part = the sum of the warps' parts of their tile.
DEVICE void add_warps(const Four* copies, WarpShare share, Four* part) {
  Four sum = {};
#pragma unroll
  for (int copy = 0; copy < WARPS; ++copy)
    if (copy < share.parts()) add(sum, copies[(copy << share.shift) * TILE_SUMS / 4]);
  *part = sum;
}

DEVICE Four add_ctas(const Four* part) {
  Four sum = read_remote(part, 0);
#pragma unroll
  for (int rank = 1; rank < cluster_size(); ++rank) add(sum, read_remote(part, rank));
  return sum;
}

// What lies behind the site's ranks counts as zero.
template <class T> DEVICE void split_row(SplitTile& to, Four t, int ranks) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= ranks) t.value[i] = 0.0f;
    if (finite_magnitude(t.value[i]) > largest) largest = finite_magnitude(t.value[i]);
  }
  const unsigned exponent = shared_exponent<4>(largest);
  T high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_number(high[i], low[i], t.value[i], exponent);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to.high[2 * lane_of_thread() + i] = low_halves(high[2 * i].bits, high[2 * i + 1].bits);
    to.low[2 * lane_of_thread() + i] = low_halves(low[2 * i].bits, low[2 * i + 1].bits);
  }
  if (lane_in_group() == 0) to.scale[lane_group()] = scale_of(exponent);
}

// ---- expand: out, transposed, [16 columns, 8 rows] = B, transposed, @ t, transposed

// What a lane has of UNIT columns of a site: 8 of them, in rows 2 t and 2 t + 1 of y and out.
template <class T> struct Columns {
  int site;   // group.sites behind the last
  int first;
  bool mine;
  Pack b[4];  // rows 4 t to 4 t + 3 of a rank tile
  Pack y[2];
};

template <class T> DEVICE void load_b(Columns<T>& columns, const Site& site, int first_rank) {
  const Factors<T> factors = factors_of<T>(site);
  const int row = first_rank + 4 * lane_in_group();
  const T* b = row_of(factors.b + columns.first, row, site.n);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    columns.b[i] = columns.mine && row + i < factors.rank ? read16(row_of(b, i, site.n)) : Pack{};
}

// With the first rank tile of B.
template <class T> DEVICE Columns<T> load_columns(const Group& group, int unit) {
  Columns<T> columns;
#pragma unroll 1
  for (columns.site = 0; columns.site < group.sites; ++columns.site) {
    const int units = ceil_div(group.site[columns.site].n, UNIT);
    if (unit < units) break;
    unit -= units;
  }
  if (columns.site == group.sites) return columns;
  const Site& site = group.site[columns.site];
  columns.first = unit * UNIT + 8 * lane_group();
  columns.mine = columns.first < site.n;
  load_b(columns, site, 0);
  return columns;
}

template <class T> DEVICE void load_y(Columns<T>& columns, const Group& group) {
  const Site& site = group.site[columns.site];
  if (columns.site == group.sites || !site.y || !columns.mine) return;
  const TileRows rows(group, 0);
  const T* y = row_of(static_cast<const T*>(site.y) + columns.first, output_row(0), site.n);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (rows.has(output_row(i))) columns.y[i] = read16(row_of(y, i, site.n));
}

// sum [2 rows, 8 columns] += t @ B of one rank tile.
template <class T> DEVICE void multiply_columns(float (&sum)[2][8], const SplitTile& t, const Pack (&b)[4]) {
  const unsigned* high = t.high + 2 * lane_of_thread();
  const unsigned* low = t.low + 2 * lane_of_thread();
  const float scale[2] = {t.scale[output_row(0)], t.scale[output_row(1)]};
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const unsigned left[4] = {
        low_halves(b[0].word[pair], b[1].word[pair]), high_halves(b[0].word[pair], b[1].word[pair]),
        low_halves(b[2].word[pair], b[3].word[pair]), high_halves(b[2].word[pair], b[3].word[pair])};
    float product[4] = {};
    multiply(product, left, low[0], low[1], T{});
    multiply(product, left, high[0], high[1], T{});
#pragma unroll
    for (int part = 0; part < 4; ++part)
      sum[part % 2][2 * pair + part / 2] += scale[part % 2] * product[part];
  }
}

// `sum` with y, rounded.
template <class T> DEVICE Pack output_of(float (&sum)[8], bool adds, const Pack& y) {
  if (adds) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = add(element(y, j, T{}), sum[j]);
  }
  Pack pack = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    T rounded;
    round_to(rounded, sum[j]);
    put(pack, j, rounded);
  }
  return pack;
}

template <class T> DEVICE void expand_columns(const Group& group, Columns<T>& columns, const SplitTile* t) {
  const Site& site = group.site[columns.site];
  t += site.rank_tile;
  float sum[2][8] = {};
#pragma unroll 1
  for (int first = 0; first < site.rank; first += RANK_TILE) {
    if (first) load_b(columns, site, first);
    multiply_columns<T>(sum, *t++, columns.b);
  }
  if (!columns.mine) return;
  const TileRows rows(group, 0);
  T* out = row_of(static_cast<T*>(site.out) + columns.first, output_row(0), site.n);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (rows.has(output_row(i)))
      write16(row_of(out, i, site.n), output_of<T>(sum[i], site.y != nullptr, columns.y[i]));
}

// Everything in one launch. Grid: CTAs of all clusters. Every cluster computes all of t, each of its CTAs a part of k.
// Shared memory: t, a part, and the chunks or each warp's sums.
template <class T> DEVICE void decode(const Group& group) {
  auto* t = reinterpret_cast<SplitTile*>(tile_memory());
  float* part = reinterpret_cast<float*>(t + group.rank_tiles);
  float* copies = part + group.rank_tiles * TILE_SUMS;
  int unit = warp_of_thread() * gridDim.x + blockIdx.x;
  Columns<T> columns = load_columns<T>(group, unit);  // they wait for nothing
  const int length = ceil_div(group.k, cluster_size() * CHUNK) * CHUNK;
  const Range k = {cluster_rank() * length, at_most((cluster_rank() + 1) * length, group.k)};
  const WarpShare share(group.rank_tiles);
  if (!HAS_SLOTS || group.rank_tiles)
    shrink_rank_tile<T>(group, k, share, reinterpret_cast<T*>(copies), copies + warp_of_thread() * TILE_SUMS);
  __syncthreads();
  const int tile = WARPS - 1 - warp_of_thread();  // the last warps have the fewest columns
  const int at = tile * TILE_SUMS + 4 * lane_of_thread();
  Four* mine = reinterpret_cast<Four*>(part + at);
  if (tile < group.rank_tiles) add_warps(reinterpret_cast<const Four*>(copies + at), share, mine);
  cluster_arrive();
  load_y(columns, group);
  cluster_wait();
  if (tile < group.rank_tiles) {
    const Site& site = group.site[site_of_rank_tile(group, tile)];
    const int first = (tile - site.rank_tile) * RANK_TILE + 4 * lane_in_group();
    split_row<T>(t[tile], add_ctas(mine), factors_of<T>(site).rank - first);
  }
  __syncthreads();
  cluster_arrive_relaxed();  // a CTA may leave once nobody reads its part; nothing is handed over
  while (columns.site < group.sites) {
    expand_columns(group, columns, t);
    columns = load_columns<T>(group, unit += gridDim.x * WARPS);
    load_y(columns, group);
  }
  cluster_wait();
}
