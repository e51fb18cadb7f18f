#include "launch.h"

namespace jax_mla {
namespace {

CUlaunchConfig ConfigOf(const Kernel& kernel, uint32_t x, uint32_t y, uint32_t z, CUstream stream) {
  CUlaunchConfig config = {};
  config.gridDimX = x;
  config.gridDimY = y;
  config.gridDimZ = z;
  config.blockDimX = kernel.block;
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes = kernel.shared_memory;
  config.hStream = stream;
  return config;
}

}  // namespace

CUresult Launch(const Driver& driver, const Kernel& kernel, Parameters p, uint32_t heads,
                CUstream stream) {
  CUlaunchAttribute cluster = {};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim.x = kernel.cluster;
  cluster.value.clusterDim.y = 1;
  cluster.value.clusterDim.z = 1;

  // Programmatic stream serialization is not set, on purpose. With it this kernel would start while
  // the one before it still runs, and it reads weights before it waits for that one: right only if
  // that one did not write them, and in an XLA program it may have (a cast, a copy). Without it the
  // wait in the kernel returns at once.
  const uint32_t clusters = (static_cast<uint32_t>(p.batch) + kernel.tokens - 1) / kernel.tokens;
  CUlaunchConfig config = ConfigOf(kernel, kernel.cluster, heads, clusters, stream);
  config.attrs = &cluster;
  config.numAttrs = 1;

  // The driver reads as many as the kernel has.
  void* parameters[] = {&p.qkv,        &p.q_norm,     &p.kv_norm,    &p.w_qb,    &p.w_uk,
                        &p.cache,      &p.slots,      &p.q_scale,    &p.k_scale, &p.q,
                        &p.qkv_stride, &p.cache_rows, &p.batch,      &p.eps,     &p.cos_sin,
                        &p.positions,  &p.q_latent,   &p.table_rows, &p.style,   &p.cache_format};
  return driver.launch_kernel(&config, kernel.function, parameters, nullptr);
}

CUresult LaunchExchange(const Driver& driver, const Kernel& kernel, ExchangeParameters p,
                        uint32_t ctas, CUstream stream) {
  const CUlaunchConfig config = ConfigOf(kernel, ctas, 1, 1, stream);
  void* parameters[] = {&p.q, &p.out, &p.control, &p.batch, &p.words, &p.replacement};
  return driver.launch_kernel(&config, kernel.function, parameters, nullptr);
}

}  // namespace jax_mla
