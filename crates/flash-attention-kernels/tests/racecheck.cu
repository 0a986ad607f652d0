// What compute-sanitizer's racecheck does not follow: docs/reliability.md has the results.
//
//     nvcc -arch=sm_90a racecheck.cu -o race && compute-sanitizer --tool racecheck ./race MODE WORDS
//
// A warp passes words to four warps through shared memory, as the kernels for Hopper publish work tiles. Bits of MODE: 1, one thread writes
// instead of all; 2, all threads arrive when a word has been read, not one of each warp; 4, all threads arrive when it has been written.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

__device__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__global__ void pass(int mode, int words, int *sums) {
  __shared__ __align__(8) uint64_t full_barrier, empty_barrier;
  __shared__ int word;
  uint32_t full = __cvta_generic_to_shared(&full_barrier), empty = __cvta_generic_to_shared(&empty_barrier);
  if (threadIdx.x == 0) {
    init(full, mode & 4 ? 32 : 1);
    init(empty, mode & 2 ? 128 : 4);
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < words; i++) {
    if (threadIdx.x < 32) {
      wait(empty, (i & 1) ^ 1);
      if (!(mode & 1) || threadIdx.x == 0) word = i;
      __syncwarp();
      if ((mode & 4) || threadIdx.x == 0) arrive(full);
    }
    wait(full, i & 1);
    sum += *(volatile int *)&word;
    __syncwarp();
    if ((mode & 2) || threadIdx.x % 32 == 0) arrive(empty);
  }
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main(int count, char **arguments) {
  if (count != 3) return printf("usage: race MODE WORDS\n"), 1;
  int *sums;
  cudaMalloc(&sums, 64 * 128 * sizeof(int));
  pass<<<64, 128>>>(atoi(arguments[1]), atoi(arguments[2]), sums);
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
