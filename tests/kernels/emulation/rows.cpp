// Behind the kernels of candidates.cu, before emulation.cpp.
using Argument = Rows;

// The compiler's layout of Rows: its size and the offset of each member, in order.
extern "C" void layout(int* to) {
  const size_t offsets[] = {
      sizeof(Rows), offsetof(Rows, logits), offsetof(Rows, temperatures), offsetof(Rows, tokens),
      offsetof(Rows, values), offsetof(Rows, totals), offsetof(Rows, not_finite), offsetof(Rows, keys),
      offsetof(Rows, sums), offsetof(Rows, greedy), offsetof(Rows, vocabulary), offsetof(Rows, parts)};
  for (size_t offset : offsets) *to++ = int(offset);
}
