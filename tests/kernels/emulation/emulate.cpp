// The end of the compiled text: what emulator.py calls. `Argument` is what each of its kernels takes.

void (*kernel_to_run)(Argument) = nullptr;
const Argument* its_argument = nullptr;

extern "C" int emulate(void (*kernel)(Argument), const Argument* argument, const int* grid, int threads, int shared_bytes,
                       int cluster, const emulation::Range* ranges, int range_count, unsigned order, char* message,
                       int size) {
  using namespace emulation;
  emulation::grid = {grid[0], grid[1], grid[2]};
  block = {threads, 1, 1};
  emulation::ranges = ranges;
  emulation::range_count = range_count;
  emulation::shared_bytes = size_t(shared_bytes);
  error.clear();
  kernel_to_run = kernel;
  its_argument = argument;
  body = [] { kernel_to_run(*its_argument); };
  if (grid[0] % cluster) error = "the grid is no multiple of the cluster";
  for (int z = 0; z < grid[2] && error.empty(); ++z)
    for (int y = 0; y < grid[1] && error.empty(); ++y)
      for (int x = 0; x < grid[0] && error.empty(); x += cluster)
        run_cluster({x, y, z}, cluster, order++);
  std::snprintf(message, size_t(size), "%s", error.c_str());
  return error.empty() ? 0 : 1;
}

extern "C" unsigned short narrow(float value, int to_bfloat) {
  return to_bfloat ? emulation::narrow_bfloat(value) : emulation::narrow_half(value);
}

extern "C" float widened(unsigned short bits) { return emulation::widen_half(bits); }
