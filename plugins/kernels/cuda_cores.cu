// LoRA shrink and expand on CUDA cores, and the code shared by all kernels: for up to 8 sites that read one x,
// out [m, n] = (y [m, n] +) t @ B [rank, n] with t = x [m, k] @ A [k, rank].
// All matrices are row-major. Sums are float32, t stays float32, and out is rounded once.
// No atomics: every sum is added in one order, so a call gives the same bits each time.
//
// Words: t has total_rank columns, the sites' ranks side by side. A vector is what one load of 16 bytes
// brings of a row of one site's A or B (fewer elements at the end of an odd rank or n); vectors are
// numbered through all sites. A column tile is the vectors of A that one CTA shrinks, a tile the rows that
// it computes.
//
//   fused           one launch for few rows and ranks: each cluster shrinks, each CTA expands a slice
//   shrink, expand  otherwise: t goes through the workspace, as the sums of `splits` parts of k
//   tensor_cores.cu, tensor_cores_fused.cu  the same on tensor cores, for 16-bit elements and more rows
//   tensor_cores_decode.cu                  one launch for few rows, where all addresses are aligned
//   slots.cu                                all of them where every row has an adapter of its own
//
// The CTAs of a cluster share k in every shrink, and add their sums through distributed shared memory in
// the order of their ranks.

constexpr int WARPS = THREADS / 32;

struct Site {
  const void* a;  // [k, rank]
  const void* b;  // [rank, n]
  const void* y;  // [m, n], or null where the delta alone is wanted
  void* out;      // [m, n]
  int n;
  int rank;
  int column;     // the site's first column
  int rank_tile;  // and its first RANK_TILE ranks, of all sites'
  int of_ranks;   // with slots: its column of `Stacks.rank`
  int stride;     // in a pass: of a row of A, the rank of its stack
};

// Where rows have adapters of their own, `Group` holds stacks: of a site A [slots, k, rank], B [slots, rank, n].
struct Stacks {
  const int* slot;   // [m]: of each row; what is no slot is the base model
  const int* rank;   // [slots, sites]: of the adapter in each slot
  int slots;
  int sites;         // of the engine
  int columns;       // of the workspace: the stacks' ranks
  int column_tiles;  // that they are
};

struct Group {
  const void* x;     // [m, k]
  float* workspace;  // [splits, m, total_rank]
  int m;
  int k;
  int sites;
  int total_rank;  // of all sites: the columns of t
  int splits;  // of k; of a decode step with slots the clusters of a pass
  int rank_tiles;  // of all sites
  Site site[MAX_SITES];
  Stacks stacks;
  unsigned long long taken;  // in a pass: a bit for each row of the tile that it computes
};

struct Range {
  int first;
  int end;
};

template <class T> constexpr int WIDTH = VECTOR_BYTES / int(sizeof(T));  // elements of a vector
template <class T> constexpr int COLUMNS = COLUMN_TILE_VECTORS * WIDTH<T>;   // of a column tile
template <class T> constexpr int PITCH = COLUMNS<T> + PAD;     // of a column tile's sums

DEVICE int ceil_div(int value, int by) { return int((unsigned(value) + unsigned(by) - 1) / unsigned(by)); }
DEVICE int at_most(int value, int limit) { return value < limit ? value : limit; }
DEVICE int at_least(int value, int limit) { return value > limit ? value : limit; }
DEVICE long long offset(int row, int stride) { return static_cast<long long>(row) * stride; }
DEVICE bool is_aligned(const void* pointer) { return reinterpret_cast<unsigned long long>(pointer) % 16 == 0; }

DEVICE int power_of_two_from(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// The range of one of `parts` of [0, total), a multiple of `unit` long except at the end.
DEVICE Range split_range(int total, int parts, int part, int unit) {
  const int length = ceil_div(ceil_div(total, parts), unit) * unit;
  const long long first = static_cast<long long>(part) * length;
  return first < total ? Range{int(first), at_most(total, int(first) + length)} : Range{total, total};
}

// What the kernels keep in shared memory; before it, with slots, lies the pass.
DEVICE unsigned char* tile_memory() { return shared_memory() + (HAS_SLOTS ? PASS_BYTES : 0); }

// The rows of a tile that a call, or a pass of it, computes.
struct TileRows {
  int count;                 // those that there are
  unsigned long long taken;  // with slots: see Group

  DEVICE TileRows(const Group& group, int row0) : count(group.m - row0), taken(HAS_SLOTS ? group.taken : 0) {}
  DEVICE bool has(int row) const { return HAS_SLOTS ? taken >> row & 1 : row < count; }
  // Any of the 16 from `row` on.
  DEVICE bool has_some(int row) const { return HAS_SLOTS ? taken >> row & 0xFFFF : row < count; }
};

// ---- packs: 16 bytes as elements

DEVICE float element(const Pack& pack, int i, float) { return float_of(pack.word[i]); }
template <class T> DEVICE float element(const Pack& pack, int i, T) {
  return widen(T{static_cast<unsigned short>(pack.word[i / 2] >> (i % 2 * 16))});
}

DEVICE void put(Pack& pack, int i, float value) { pack.word[i] = bits_of(value); }
template <class T> DEVICE void put(Pack& pack, int i, T value) {
  pack.word[i / 2] |= unsigned(value.bits) << (i % 2 * 16);
}

template <class T> DEVICE Pack gather(const T* from, int valid) {
  Pack pack = {};
#pragma unroll
  for (int i = 0; i < WIDTH<T>; ++i)
    if (i < valid) put(pack, i, read(from + i));
  return pack;
}

// ---- vectors

template <class T> struct Vector {
  const T* first = nullptr;
  int stride = 0;
  int valid = 0;       // its elements; 0 past the last vector
  bool whole = false;  // every row of it is one aligned load of 16 bytes
  int site = 0;
  int start = 0;  // its first column within the site
};

// What a tile of rows multiplies by at a site.
template <class T> struct Factors {
  const T* a;
  const T* b;
  int rank;
};

template <class T> DEVICE Factors<T> factors_of(const Site& site) {
  return {static_cast<const T*>(site.a), static_cast<const T*>(site.b), site.rank};
}

enum class Of { A, B };

template <Of Factor> DEVICE int width_of(const Site& site) { return Factor == Of::A ? site.rank : site.n; }

// From a row of A or B to the next: a stack's rank may be larger than the adapter's.
DEVICE int stride_of_a(const Site& site) { return HAS_SLOTS ? site.stride : site.rank; }
template <Of Factor> DEVICE int stride_of(const Site& site) { return Factor == Of::A ? stride_of_a(site) : site.n; }

template <class T, Of Factor> DEVICE int count_vectors(const Group& group) {
  int count = 0;
  for (int s = 0; s < group.sites; ++s) count += ceil_div(width_of<Factor>(group.site[s]), WIDTH<T>);
  return count;
}

// The vector from column `start` of a site's A or B on; an empty one behind the last.
template <class T, Of Factor> DEVICE Vector<T> vector_at(const Group& group, int site, int start) {
  const Factors<T> factors = factors_of<T>(group.site[site]);
  const T* matrix = Factor == Of::A ? factors.a : factors.b;
  const int width = width_of<Factor>(group.site[site]), stride = stride_of<Factor>(group.site[site]);
  if (start >= width) return {};
  const bool whole = stride % WIDTH<T> == 0 && is_aligned(matrix);
  return {matrix + start, stride, at_most(width - start, WIDTH<T>), whole, site, start};
}

template <class T, Of Factor> DEVICE Vector<T> vector_of(const Group& group, int index) {
  for (int s = 0; s < group.sites; ++s) {
    const int vectors = ceil_div(width_of<Factor>(group.site[s]), WIDTH<T>);
    if (index < vectors) return vector_at<T, Factor>(group, s, index * WIDTH<T>);
    index -= vectors;
  }
  return {};
}

// ---- CUDA cores: lanes own vectors, and rows of A or B by turns

template <class T, int Depth> 
DEVICE void load_rows(Pack (&to)[Depth], const Vector<T>& vector, int row, int end, int step) {
  if (vector.whole) {  // outside the loop, so that all loads are on their way before one is used
#pragma unroll
    for (int d = 0; d < Depth; ++d, row += step)
      to[d] = row < end ? read16(vector.first + offset(row, vector.stride)) : Pack{};
  } else {
#pragma unroll
    for (int d = 0; d < Depth; ++d, row += step)
      to[d] = gather(vector.first + offset(row, vector.stride), row < end ? vector.valid : 0);
  }
}

// sum [Rows, vector] += left [Rows, first:end:step] @ vector [first:end:step, :].
template <class T, int Rows, class Left>
DEVICE void accumulate(float (&sum)[Rows][WIDTH<T>], const Left& left, const Vector<T>& vector, int first, int end,
                       int step) {
  constexpr int DEPTH = Rows > 4 ? 4 : 8;
  for (int row = first; row < end; row += DEPTH * step) {
    Pack right[DEPTH];
    float factor[DEPTH][Rows];
    load_rows(right, vector, row, end, step);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
#pragma unroll
      for (int i = 0; i < Rows; ++i) factor[d][i] = row + d * step < end ? left(i, row + d * step) : 0.0f;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
#pragma unroll
      for (int i = 0; i < Rows; ++i)
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) sum[i][j] += factor[d][i] * element(right[d], j, T{});
  }
}

// The rows of x in a tile; rows that are not computed are zeros.
template <class T> struct RowsOfX {
  const T* x;
  int stride;
  TileRows rows;
  DEVICE float operator()(int i, int column) const {
    return rows.has(i) ? widen(read(x + offset(i, stride) + column)) : 0.0f;
  }
};

// The rows of t in shared memory, from a site's first column on.
struct RowsOfT {
  const float* t;
  int stride;
  DEVICE float operator()(int i, int column) const { return t[i * stride + column]; }
};

// Which rows of a tile's sums a lane holds after warp_reduce_scatter().
struct ReducedRows {
  int first;
  int rows;
  bool mine;  // false where another lane holds the same and writes it
};

// A reduce-scatter: while a lane has several rows it keeps half and gives half away, 2 Rows shuffles for
// each column, where a tree of whole sums takes 5 Rows. A template, because a loop over Half would index
// `sum` at run time.
template <class T, int Half, int Rows>
DEVICE void reduce_scatter_step(float (&sum)[Rows][WIDTH<T>], int width, int& mask, ReducedRows& reduced) {
  if constexpr (Half >= 1) {
    if (mask >= width) {
      const bool upper = threadIdx.x & mask;
#pragma unroll
      for (int i = 0; i < Half; ++i)
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) {
          const float first = sum[i][j], second = sum[Half + i][j];
          sum[i][j] = (upper ? second : first) + shuffle_xor(upper ? first : second, mask);
        }
      reduced = {reduced.first + (upper ? Half : 0), Half, true};
      mask /= 2;
    }
    reduce_scatter_step<T, Half / 2>(sum, width, mask, reduced);
  }
}

// Adds up the lanes whose numbers differ only above the bits of `width`, a power of two.
template <class T, int Rows> DEVICE ReducedRows warp_reduce_scatter(float (&sum)[Rows][WIDTH<T>], int width) {
  ReducedRows reduced = {0, Rows, true};
  int mask = 16;
  reduce_scatter_step<T, Rows / 2>(sum, width, mask, reduced);
  for (; mask >= width; mask /= 2) {
#pragma unroll
    for (int j = 0; j < WIDTH<T>; ++j) sum[0][j] += shuffle_xor(sum[0][j], mask);
    reduced.mine = reduced.mine && !(threadIdx.x & mask);
  }
  return reduced;
}

// part = the sum of the copies of it in scratch, `floats` each, where a column is one of the first `columns`.
template <class T> DEVICE void add_copies(const float* scratch, int copies, int floats, int columns, float* part) {
  for (int i = threadIdx.x; i < floats; i += THREADS) {
    if (i % PITCH<T> >= columns) continue;
    float total = 0.0f;
#pragma unroll
    for (int copy = 0; copy < copies; ++copy) total += scratch[copy * floats + i];
    part[i] = total;
  }
}

// part [Rows, COLUMN_TILE_VECTORS vectors] = x [tile, k] @ A [k, vectors]. Scratch: as large for each warp.
template <class T, int Rows>
DEVICE void shrink_column_tile(const Group& group, int row0, Range k, int first_vector, float* scratch, float* part) {
  const int vectors = at_most(count_vectors<T, Of::A>(group) - first_vector, COLUMN_TILE_VECTORS);
  const int width = power_of_two_from(vectors);
  const int local = threadIdx.x % width;
  float sum[Rows][WIDTH<T>] = {};
  const Vector<T> vector = local < vectors ? vector_of<T, Of::A>(group, first_vector + local) : Vector<T>{};
  const RowsOfX<T> x = {static_cast<const T*>(group.x) + offset(row0, group.k), group.k, {group, row0}};
  accumulate<T, Rows>(sum, x, vector, k.first + threadIdx.x / width, k.end, THREADS / width);
  const ReducedRows reduced = warp_reduce_scatter<T, Rows>(sum, width);
  float* mine = scratch + (threadIdx.x / 32 * Rows + reduced.first) * PITCH<T> + local * WIDTH<T>;
#pragma unroll
  for (int i = 0; i < Rows; ++i)
#pragma unroll
    for (int j = 0; j < WIDTH<T>; ++j)
      if (i < reduced.rows && reduced.mine) mine[i * PITCH<T> + j] = sum[i][j];
  __syncthreads();
  add_copies<T>(scratch, WARPS, Rows * PITCH<T>, vectors * WIDTH<T>, part);
}

// Calls store(row, column of t, value) with the cluster's sums of some of a column tile's rows x columns.
template <class T, class Store>
DEVICE void add_parts(const Group& group, int first_vector, const float* part, Range some, const Store& store) {
  for (int i = some.first + threadIdx.x; i < some.end; i += THREADS) {
    const int row = i / COLUMNS<T>, column = i % COLUMNS<T>;
    const Vector<T> vector = vector_of<T, Of::A>(group, first_vector + column / WIDTH<T>);
    if (column % WIDTH<T> >= vector.valid) continue;
    float total = 0.0f;
#pragma unroll
    for (int rank = 0; rank < cluster_size(); ++rank) total += read_remote(part + row * PITCH<T> + column, rank);
    store(row, group.site[vector.site].column + vector.start + column % WIDTH<T>, total);
  }
}

// z = y + delta; where the delta is zero, y as it is, and so is the sign of its zeros.
DEVICE float add(float y, float delta) { return delta == 0.0f ? y : y + delta; }

// A vector of one row of a site's output, and of y.
template <class T> struct OutputVector {
  T* out;
  const T* y;
  int valid;
  bool whole;

  DEVICE OutputVector(const Site& site, int row, int start, int valid) : valid(valid) {
    const long long at = offset(row, site.n) + start;
    out = static_cast<T*>(site.out) + at;
    y = site.y ? static_cast<const T*>(site.y) + at : nullptr;
    whole = valid == WIDTH<T> && is_aligned(y) && is_aligned(out);
  }
  DEVICE Pack read_y() const {
    if (!y) return {};
    return whole ? read16(y) : gather(y, valid);
  }
  // `sum` holds the values in float32.
  DEVICE void write_sums(const Pack& addend, const float* sum) const {
    Pack to = {};
#pragma unroll
    for (int j = 0; j < WIDTH<T>; ++j) {
      T rounded;
      round_to(rounded, y ? add(element(addend, j, T{}), sum[j]) : sum[j]);
      if (whole) put(to, j, rounded);
      else if (j < valid) write(out + j, rounded);
    }
    if (whole) write16(out, to);
  }
};

// The tile's rows of the vectors of all B, from t [Rows, total_rank] in shared memory.
template <class T, int Rows> DEVICE void expand_slice(const Group& group, int row0, const float* t, Range vectors) {
  // Few vectors: the lanes of a warp share a vector's ranks. Two vectors side by side fill a sector.
  const int width = at_most(power_of_two_from(at_least(ceil_div(vectors.end - vectors.first, WARPS), 2)), 32);
  const int lane = threadIdx.x % 32;
  const TileRows rows(group, row0);
  for (int first = vectors.first + threadIdx.x / 32 * width; first < vectors.end; first += WARPS * width) {
    const int index = first + lane % width;
    const Vector<T> vector = index < vectors.end ? vector_of<T, Of::B>(group, index) : Vector<T>{};
    const Site& site = group.site[vector.site];
    float sum[Rows][WIDTH<T>] = {};
    const int rank = vector.valid ? factors_of<T>(site).rank : 0;
    accumulate<T, Rows>(sum, RowsOfT{t + site.column, group.total_rank}, vector, lane / width, rank, 32 / width);
    const ReducedRows reduced = warp_reduce_scatter<T, Rows>(sum, width);
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const int row = reduced.first + i;
      if (vector.valid && i < reduced.rows && reduced.mine && rows.has(row)) {
        const OutputVector<T> output(site, row0 + row, vector.start, vector.valid);
        output.write_sums(output.read_y(), sum[i]);
      }
    }
  }
}

// B does not wait for the shrink: fetch the slice while x @ A is computed.
template <class T> DEVICE void prefetch_slice(const Group& group, Range vectors) {
  for (int index = vectors.first + threadIdx.x; index < vectors.end; index += THREADS) {
    const Vector<T> vector = vector_of<T, Of::B>(group, index);
    const int rank = factors_of<T>(group.site[vector.site]).rank;
    for (int row = 0; row < rank; ++row) prefetch(vector.first + offset(row, vector.stride));
  }
}

// Everything in one launch. Grid: [CTAs of all clusters, tiles of Rows]. Every cluster computes all of t.
// Shared memory: t [Rows, total_rank], scratch of shrink_column_tile, a part for each column tile.
template <class T, int Rows> DEVICE void fused(const Group& group) {
  float* t = reinterpret_cast<float*>(tile_memory());
  float* scratch = t + Rows * group.total_rank;
  float* parts = scratch + WARPS * Rows * PITCH<T>;
  const int row0 = blockIdx.y * Rows;
  const Range slice = split_range(count_vectors<T, Of::B>(group), gridDim.x, blockIdx.x, 1);
  prefetch_slice<T>(group, slice);
  const Range k = split_range(group.k, cluster_size(), cluster_rank(), 1);
  const int vectors = count_vectors<T, Of::A>(group);
  for (int first = 0; first < vectors; first += COLUMN_TILE_VECTORS) {
    shrink_column_tile<T, Rows>(group, row0, k, first, scratch, parts + first / COLUMN_TILE_VECTORS * Rows * PITCH<T>);
    __syncthreads();  // the next column tile overwrites the scratch
  }
  cluster_arrive();
  cluster_wait();
  const auto keep = [&](int row, int column, float value) { t[row * group.total_rank + column] = value; };
  for (int first = 0; first < vectors; first += COLUMN_TILE_VECTORS)
    add_parts<T>(group, first, parts + first / COLUMN_TILE_VECTORS * Rows * PITCH<T>, {0, Rows * COLUMNS<T>}, keep);
  __syncthreads();
  cluster_arrive_relaxed();  // said early, awaited late: a CTA may leave once nobody reads its parts
  expand_slice<T, Rows>(group, row0, t, slice);
  cluster_wait();
}

// ---- the pair on CUDA cores

DEVICE float* sums_of(const Group& group, int split, int row) {
  const int columns = HAS_SLOTS ? group.stacks.columns : group.total_rank;
  return group.workspace + (static_cast<long long>(split) * group.m + row) * columns;
}

// What a cluster, as one of many, shrinks. Grid: [tiles of rows x column tiles x CTAs of a cluster, splits].
struct ShrinkRange {
  int row0;
  int first_vector;
  Range k;  // of this CTA
};

template <class T> DEVICE ShrinkRange shrink_range_of_cta(const Group& group, int rows, int unit) {
  const int own_tiles = ceil_div(count_vectors<T, Of::A>(group), COLUMN_TILE_VECTORS);
  const int column_tiles = HAS_SLOTS ? group.stacks.column_tiles : own_tiles;
  const int tile = blockIdx.x / cluster_size();
  const int part = blockIdx.y * cluster_size() + cluster_rank();
  const Range k = split_range(group.k, group.splits * cluster_size(), part, unit);
  // Column tiles of the same rows side by side: they read one x.
  return {tile / column_tiles * rows, tile % column_tiles * COLUMN_TILE_VECTORS, k};
}

// Adds the parts [rows, column tile] of the cluster's CTAs, and writes the sums of this split.
template <class T> DEVICE void save_parts(const Group& group, const ShrinkRange& mine, int rows, const float* part) {
  const TileRows taken(group, mine.row0);
  const auto save = [&](int row, int column, float value) {
    if (!HAS_SLOTS || taken.has(row)) write(sums_of(group, blockIdx.y, mine.row0 + row) + column, value);
  };
  const int sums = at_most(rows, group.m - mine.row0) * COLUMNS<T>;
  cluster_arrive();
  cluster_wait();
  add_parts<T>(group, mine.first_vector, part, split_range(sums, cluster_size(), cluster_rank(), 1), save);
  cluster_arrive_relaxed();
  cluster_wait();  // a CTA may leave once nobody reads its part
}

// Shared memory: scratch of shrink_column_tile, a part.
template <class T, int Rows> DEVICE void shrink(const Group& group) {
  float* scratch = reinterpret_cast<float*>(tile_memory());
  float* part = scratch + WARPS * Rows * PITCH<T>;
  const ShrinkRange mine = shrink_range_of_cta<T>(group, Rows, 1);
  if (HAS_SLOTS && mine.first_vector >= count_vectors<T, Of::A>(group)) return;  // of the stacks, not the adapter
  shrink_column_tile<T, Rows>(group, mine.row0, mine.k, mine.first_vector, scratch, part);
  save_parts<T>(group, mine, Rows, part);
}

// t [Rows, total_rank] of the sites in a slice. Rows that are not computed are zeros.
template <class T, int Rows> DEVICE void add_splits(const Group& group, int row0, Range slice, float* t) {
  const Site& last = group.site[vector_of<T, Of::B>(group, slice.end - 1).site];
  const int first = group.site[vector_of<T, Of::B>(group, slice.first).site].column;
  const TileRows rows(group, row0);
  for (int column = first + threadIdx.x; column < last.column + last.rank; column += THREADS) {
    float sum[Rows] = {};
    for (int split = 0; split < group.splits; ++split)
#pragma unroll
      for (int i = 0; i < Rows; ++i)
        if (rows.has(i)) sum[i] += read(sums_of(group, split, row0 + i) + column);
#pragma unroll
    for (int i = 0; i < Rows; ++i) t[i * group.total_rank + column] = sum[i];
  }
}

// Grid: [tiles of Rows, slices of all vectors of B]. Shared memory: t [Rows, total_rank].
template <class T, int Rows> DEVICE void expand(const Group& group) {
  float* t = reinterpret_cast<float*>(tile_memory());
  const int row0 = blockIdx.x * Rows;
  const Range slice = split_range(count_vectors<T, Of::B>(group), gridDim.y, blockIdx.y, 1);
  if (slice.first == slice.end) return;
  add_splits<T, Rows>(group, row0, slice, t);
  __syncthreads();
  expand_slice<T, Rows>(group, row0, t, slice);
}
