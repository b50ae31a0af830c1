// The KEPT most probable tokens of each row of logits [rows, vocabulary], best first: the greatest logit first and
// of equal ones the lower id first; and what the probabilities of all tokens are parts of.
// No atomics: keys have one order and sums are added in one, so a call gives the same bits each time.
//
//   best_of_parts  each CTA sorts PART tokens of one row, and leaves the best of them in the workspace
//   best_of_rows   one CTA for each row merges what those left
//
// A token and its logit are one key, the greater the better. A list is KEPT keys in falling order; in shared
// memory lie LISTS of them.

constexpr int PART = LISTS * KEPT;  // tokens of a CTA
constexpr unsigned INFINITE = 0x7F800000u;
constexpr unsigned NAN_BITS = 0x7FC00000u;

using Key = unsigned long long;

struct Rows {
  const void* logits;          // [rows, vocabulary]
  const double* temperatures;  // [rows]; 0, which is greedy, counts as 1
  int* tokens;                 // [rows, KEPT]; -1 where the vocabulary is smaller
  float* values;               // [rows, KEPT], their logits; -inf where the vocabulary is smaller
  double* totals;              // [rows], the sum of exp((logit - greatest) / temperature) over the vocabulary
  int* not_finite;             // [rows], 1 where a logit is NaN or infinite: nothing else of that row counts then
  Key* keys;                   // [rows, parts, KEPT], and
  double* sums;                // [rows, parts], as totals but of a part: the workspace
  long long* greedy;           // [rows], the first of `tokens`, or 0 where that is -1; null: not written
  int vocabulary;
  int parts;
};

// ---- keys

DEVICE Key key_of(float logit, int token) {
  const unsigned bits = bits_of(logit == 0.0f ? 0.0f : logit);  // -0 equals 0
  const unsigned rising = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(rising) << 32 | ~unsigned(token);
}

DEVICE int token_of(Key key) { return int(~unsigned(key)); }

DEVICE float logit_of(Key key) {
  const unsigned rising = unsigned(key >> 32);
  return float_of(rising >> 31 ? rising & 0x7FFFFFFFu : ~rising);
}

DEVICE Key no_token() { return key_of(-float_of(INFINITE), -1); }

// ---- lists

// One step of a bitonic network: keys `distance` apart are put in falling order, in every other run rising.
DEVICE void compare(Key* keys, int count, int distance, int run) {
  for (int pair = threadIdx.x; pair < count / 2; pair += THREADS) {
    const int at = 2 * pair - (pair & (distance - 1));  // a power of two
    const Key first = keys[at], second = keys[at + distance];
    if ((first < second) != ((at & run) != 0)) {
      keys[at] = second;
      keys[at + distance] = first;
    }
  }
  __syncthreads();
}

DEVICE void sort_lists(Key* keys) {
  for (int run = 2; run <= KEPT; run *= 2)
    for (int distance = run / 2; distance > 0; distance /= 2) compare(keys, PART, distance, run < KEPT ? run : 0);
}

// The best keys of all lists become the first list. Of two lists, one of them backwards, the greater of each
// two keys are the best of both; they rise and fall no more than once, so that half a sort orders them.
DEVICE void keep_best(Key* keys) {
  for (int half = PART / 2; half >= KEPT; half /= 2) {
    for (int i = threadIdx.x; i < half; i += THREADS) {
      const Key other = keys[half + i / KEPT * KEPT + KEPT - 1 - i % KEPT];
      if (keys[i] < other) keys[i] = other;
    }
    __syncthreads();
    for (int distance = KEPT / 2; distance > 0; distance /= 2) compare(keys, half, distance, 0);
  }
}

// ---- sums

DEVICE bool is_finite(float value) { return (bits_of(value) & INFINITE) != INFINITE; }

DEVICE double temperature_of(const Rows& rows, int row) {
  const double temperature = read(rows.temperatures + row);
  return temperature == 0.0 ? 1.0 : temperature;
}

// A part of a total; NaN makes a NaN of every sum, and so does infinity here.
DEVICE double term(float logit, float greatest, double temperature) {
  if (!is_finite(logit)) return float_of(NAN_BITS);
  return exp((static_cast<double>(logit) - greatest) / temperature);
}

// The sum of the values of all threads, in one order. Scratch: a double for each.
DEVICE double add_up(double value, double* scratch) {
  scratch[threadIdx.x] = value;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    __syncthreads();
  }
  return scratch[0];
}

// ---- kernels. Shared memory: the lists, and a double for each thread

DEVICE long long part_at(const Rows& rows, int row, int part) {
  return static_cast<long long>(row) * rows.parts + part;
}

// Grid: [parts, rows].
template <class T> DEVICE void best_of_parts(const Rows& rows) {
  Key* keys = reinterpret_cast<Key*>(shared_memory());
  const int row = blockIdx.y, first = blockIdx.x * PART;
  const T* logits = static_cast<const T*>(rows.logits) + static_cast<long long>(row) * rows.vocabulary;
  float mine[PART / THREADS];
#pragma unroll
  for (int i = 0; i < PART / THREADS; ++i) {
    const int token = first + i * THREADS + threadIdx.x;
    const bool is_token = token < rows.vocabulary;
    mine[i] = is_token ? widen(read(logits + token)) : 0.0f;
    keys[token - first] = is_token ? key_of(mine[i], token) : no_token();
  }
  __syncthreads();
  sort_lists(keys);
  keep_best(keys);
  const float greatest = logit_of(keys[0]);
  const double temperature = temperature_of(rows, row);
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < PART / THREADS; ++i)
    if (first + i * THREADS + threadIdx.x < rows.vocabulary) sum += term(mine[i], greatest, temperature);
  sum = add_up(sum, reinterpret_cast<double*>(keys + PART));
  const long long part = part_at(rows, row, blockIdx.x);
  if (threadIdx.x == 0) write(rows.sums + part, sum);
  for (int i = threadIdx.x; i < KEPT; i += THREADS) write(rows.keys + part * KEPT + i, keys[i]);
}

// Brings the next lists of a row behind the first, which holds the best so far.
DEVICE void load_lists(const Rows& rows, int row, int part, Key* keys) {
  for (int i = KEPT + threadIdx.x; i < PART; i += THREADS) {
    const int list = part + i / KEPT - 1;
    keys[i] = list < rows.parts ? read(rows.keys + part_at(rows, row, list) * KEPT + i % KEPT) : no_token();
  }
  __syncthreads();
}

// The sums of the parts, each of which began at the part's own greatest logit.
DEVICE double total_of(const Rows& rows, int row, float greatest, double* scratch) {
  const double temperature = temperature_of(rows, row);
  double sum = 0.0;
  for (int part = threadIdx.x; part < rows.parts; part += THREADS) {
    const float own = logit_of(read(rows.keys + part_at(rows, row, part) * KEPT));
    sum += read(rows.sums + part_at(rows, row, part)) * term(own, greatest, temperature);
  }
  return add_up(sum, scratch);
}

// Grid: [rows].
DEVICE void best_of_row(const Rows& rows) {
  Key* keys = reinterpret_cast<Key*>(shared_memory());
  const int row = blockIdx.x;
  for (int i = threadIdx.x; i < KEPT; i += THREADS) keys[i] = no_token();
  for (int part = 0; part < rows.parts; part += LISTS - 1) {
    load_lists(rows, row, part, keys);
    keep_best(keys);
  }
  const double total = total_of(rows, row, logit_of(keys[0]), reinterpret_cast<double*>(keys + PART));
  if (threadIdx.x == 0) {
    write(rows.totals + row, total);
    write(rows.not_finite + row, int(total != total));
    if (rows.greedy) write(rows.greedy + row, static_cast<long long>(token_of(keys[0]) < 0 ? 0 : token_of(keys[0])));
  }
  for (int i = threadIdx.x; i < KEPT; i += THREADS) {
    const long long at = static_cast<long long>(row) * KEPT + i;
    write(rows.tokens + at, token_of(keys[i]));
    write(rows.values + at, logit_of(keys[i]));
  }
}
