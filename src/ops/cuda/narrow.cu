// Matrix products of up to 128 rows.
//
// A block has a multiprocessor to itself and takes tiles of the product in turn: all rows of x,
// some rows of the weight. One thread has the copy engine fill a ring in shared memory with pieces
// of both, 64 columns wide, and a warpgroup for 64 rows of x multiplies them. The ring fills with
// weights before the kernel in front has ended, so that the device's memory is busy meanwhile, and
// with the next tile's while a tile's results are stored.
//
// Weights pass the caches once; x stays in them, for every block reads all of it. Products with few
// outputs are cut along their columns too: their parts are added up by whoever reads them.

#include "ops/cuda/narrow.h"

#include <algorithm>

#include "core/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/mlp_gates.cuh"
#include "ops/cuda/tensor_copy.cuh"
#include "ops/cuda/vector_width.h"
#include "ops/cuda/warpgroup_mma.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kElement = 2, kLine = 128, kPieceColumns = kLine / kElement;
constexpr int kSwizzleBytes = 1024;  // what its pattern repeats after
constexpr int kMostStages = 12;
constexpr int kBarrierBytes = kSwizzleBytes;
constexpr int kMostShared = 226 << 10;
constexpr int kLeastPieces = 4;  // of a part

struct NarrowCall {
  CUtensorMap x, weight;
  const float* bias;
  LinearActivation activation;
  float scale;
  void* y;
  int64_t y_stride, part_stride;
  DType y_dtype;
  int rows, outputs;  // pairs of rows of the weight where those are gate and up
  int pieces, tiles, parts, stages;
};

// kRows: of the weight in a tile. kGroups: warpgroups.
template <int kRows, bool kPaired, int kGroups>
class Product {
 public:
  static constexpr int kOutputs = kPaired ? kRows / 2 : kRows;
  static constexpr int kXBytes = kGroups * kWarpgroupRows * kLine;
  static constexpr int kStageBytes = kXBytes + kRows * kLine;
  static constexpr int kThreads = kGroups * kWarpgroup + 32;

  __device__ Product(const NarrowCall& p, uint32_t shared)
      : p_(p),
        filled_(shared),
        emptied_(shared + kMostStages * 8),
        ring_(shared + kBarrierBytes),
        part_(static_cast<int>(blockIdx.x) % p.parts),
        first_tile_(static_cast<int>(blockIdx.x) / p.parts),
        tile_step_(static_cast<int>(gridDim.x) / p.parts),
        first_piece_(p.pieces * part_ / p.parts),
        pieces_(p.pieces * (part_ + 1) / p.parts - first_piece_) {}

  __device__ void init_barriers() const {
    for (int i = 0; i < p_.stages; ++i) {
      init_barrier(filled(i), 1);
      init_barrier(emptied(i), kGroups * kWarpgroup / 32);
    }
    publish_barriers();
  }

  // By one thread.
  __device__ void fill() {
    const uint64_t once = read_once(), often = read_often();
    const int early = min(p_.stages, pieces_);
    for (int i = 0; i < early; ++i) fetch_weight(first_tile_, i, i, once);
    wait_for_predecessor();
    int fetched = early;
    for (int tile = first_tile_; tile < p_.tiles; tile += tile_step_) {
      for (int i = 0; i < pieces_; ++i) {
        if (fetched > 0) {
          --fetched;
        } else {
          wait_phase(emptied(stage_), parity_ ^ 1);
          fetch_weight(tile, i, stage_, once);
        }
        copy_tile(stage(stage_), p_.x, 0, column(i), filled(stage_), often);
        advance();
      }
    }
  }

  __device__ void multiply() {
    for (int tile = first_tile_; tile < p_.tiles; tile += tile_step_) {
      float c[kRows / 2] = {};
      for (int i = 0; i < pieces_; ++i) {
        wait_phase(filled(stage_), parity_);
        add_piece(c);
        wait_products_but<1>();
        if (i > 0) release(before());
        advance();
      }
      wait_products_but<0>();
      release(before());
      store(tile, c);
    }
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int group() { return static_cast<int>(threadIdx.x) / kWarpgroup; }
  __device__ uint32_t filled(int stage) const { return filled_ + stage * 8; }
  __device__ uint32_t emptied(int stage) const { return emptied_ + stage * 8; }
  __device__ uint32_t stage(int stage) const { return ring_ + stage * kStageBytes; }
  __device__ int column(int piece) const { return (first_piece_ + piece) * kPieceColumns; }
  __device__ int before() const { return (stage_ == 0 ? p_.stages : stage_) - 1; }
  __device__ void advance() {
    if (++stage_ < p_.stages) return;
    stage_ = 0;
    parity_ ^= 1;
  }

  // Gates come first in a tile, then as many of up.
  __device__ void fetch_weight(int tile, int piece, int at, uint64_t policy) const {
    const uint32_t to = stage(at) + kXBytes;
    arrive_expecting(filled(at), kStageBytes);
    copy_tile(to, p_.weight, tile * kOutputs, column(piece), filled(at), policy);
    if constexpr (kPaired)
      copy_tile(to + kOutputs * kLine, p_.weight, p_.outputs + tile * kOutputs, column(piece),
                filled(at), policy);
  }

  __device__ void add_piece(float (&c)[kRows / 2]) const {
    const uint32_t x = stage(stage_) + group() * kWarpgroupRows * kLine;
    const uint32_t weight = stage(stage_) + kXBytes;
    begin_products();
#pragma unroll
    for (int at = 0; at < kLine; at += kWarpgroupDepth * kElement)
      multiply_rows<kRows>(c, swizzled_rows(x + at), swizzled_rows(weight + at));
    commit_products();
  }
  __device__ void release(int at) const {
    if (lane() == 0) arrive(emptied(at));
  }

  __device__ void store(int tile, const float (&c)[kRows / 2]) const {
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / 32;
    const int first = group() * kWarpgroupRows + warp * 16 + lane() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + half * 8;
      if (row >= p_.rows) continue;
#pragma unroll
      for (int j = 0; j < kOutputs / 8; ++j) {
        const int output = tile * kOutputs + j * 8 + lane() % 4 * 2;
        if (output >= p_.outputs) continue;
        float y[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = j * 4 + half * 2 + e;
          y[e] = result(c[at], c[kPaired ? at + kOutputs / 2 : at], output + e);
        }
        store_pair(p_.y, p_.y_dtype, part_ * p_.part_stride + row * p_.y_stride + output, y);
      }
    }
  }
  __device__ float result(float sum, float up, int output) const {
    const float y = sum + bias(output);
    if constexpr (kPaired) return swiglu(y, p_.scale, up + bias(p_.outputs + output));
    return p_.activation == LinearActivation::kReluSquared ? relu_squared(y, p_.scale) : y;
  }
  __device__ float bias(int row) const { return p_.bias && part_ == 0 ? __ldg(p_.bias + row) : 0; }

  const NarrowCall& p_;
  const uint32_t filled_, emptied_, ring_;
  const int part_, first_tile_, tile_step_, first_piece_, pieces_;
  int stage_ = 0, parity_ = 0;  // of the ring
};

template <int kRows, bool kPaired, int kGroups>
__global__ void __launch_bounds__(Product<kRows, kPaired, kGroups>::kThreads, 1)
    narrow_kernel(const __grid_constant__ NarrowCall p) {
#if REPLAYSSM_HAS_WARPGROUPS
  release_successor();
  extern __shared__ char memory[];
  const uint32_t shared =
      (shared_address(memory) + kSwizzleBytes - 1) & ~uint32_t{kSwizzleBytes - 1};
  Product<kRows, kPaired, kGroups> product(p, shared);
  if (threadIdx.x == 0) product.init_barriers();
  __syncthreads();
  if (threadIdx.x < kGroups * kWarpgroup) {
    product.multiply();
  } else if (threadIdx.x % 32 == 0) {
    product.fill();
  }
#endif
}

// A matrix as tiles of `rows` rows and a piece's columns.
CUtensorMap tile_map(const void* data, int64_t rows, int64_t columns, int64_t stride,
                     int tile_rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               "narrow_product");
    REPLAYSSM_CHECK(found == cudaDriverEntryPointSuccess, "no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride * kElement)};
  const cuuint32_t box[] = {kPieceColumns, static_cast<cuuint32_t>(tile_rows)}, step[] = {1, 1};
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides,
             box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  REPLAYSSM_CHECK(status == CUDA_SUCCESS, "tensor map: ", static_cast<int>(status));
  return map;
}

bool is_paired(const LinearParams& p) { return p.activation == LinearActivation::kSwiGlu; }

template <int kRows, bool kPaired, int kGroups>
void launch(NarrowCall call, const LinearParams& p, cudaStream_t stream) {
  using Tile = Product<kRows, kPaired, kGroups>;
  call.x = tile_map(p.x, p.rows, p.in_features, p.x_head_stride, kGroups * kWarpgroupRows);
  call.weight = tile_map(p.weight, p.out_features, p.in_features, p.in_features, Tile::kOutputs);
  constexpr int kFixed = kBarrierBytes + kSwizzleBytes;  // and what its alignment may take
  call.stages = std::min(kMostStages, (kMostShared - kFixed) / Tile::kStageBytes);
  call.tiles = (call.outputs + Tile::kOutputs - 1) / Tile::kOutputs;
  const int most = multiprocessors("narrow_product") / call.parts;
  const auto kernel = narrow_kernel<kRows, kPaired, kGroups>;
  const int shared = kFixed + call.stages * Tile::kStageBytes;
  reserve_shared("narrow_product", kernel, shared);
  launch_dependent("narrow_product", kernel,
                   dim3(static_cast<unsigned>(std::min(call.tiles, most) * call.parts)),
                   Tile::kThreads, shared, stream, call);
}

template <int kRows>
void launch_rows(const NarrowCall& call, const LinearParams& p, cudaStream_t stream) {
  const bool two = p.rows > kWarpgroupRows;
  if (is_paired(p)) {
    return two ? launch<kRows, true, 2>(call, p, stream) : launch<kRows, true, 1>(call, p, stream);
  }
  two ? launch<kRows, false, 2>(call, p, stream) : launch<kRows, false, 1>(call, p, stream);
}

}  // namespace

std::vector<NarrowTile> narrow_tiles(const LinearParams& p) {
  const int64_t outputs = p.out_features / (is_paired(p) ? 2 : 1);
  const bool fits = p.heads == 1 && p.rows >= kLeastNarrowRows && p.rows <= kMostNarrowRows &&
                    p.dtype == DType::kBFloat16 && p.in_features > 0 && outputs % 8 == 0 &&
                    rows_aligned(p.x, p.x_head_stride * kElement) &&
                    rows_aligned(p.weight, p.in_features * kElement) &&
                    rows_aligned(p.y, p.y_head_stride * int64_t{sizeof(float)}) &&
                    rows_aligned(p.activated) && p.out_features < (1 << 28) &&
                    p.in_features < (1 << 28);
  std::vector<NarrowTile> tiles;
  if (!fits || compute_capability("narrow_product") != 9) return tiles;
  const int64_t blocks = multiprocessors("narrow_product");
  const int64_t pieces = (p.in_features + kPieceColumns - 1) / kPieceColumns;
  for (const int weight_rows : {96, 144, 192}) {
    const int64_t count = (p.out_features + weight_rows - 1) / weight_rows;
    const int64_t most = std::min({p.most_parts, pieces / kLeastPieces, blocks / count});
    tiles.push_back({weight_rows, static_cast<int>(std::max<int64_t>(most, 1))});
  }
  return tiles;
}

void narrow_product(const LinearParams& p, const NarrowTile& tile, cudaStream_t stream) {
  if (p.rows == 0 || p.out_features == 0) return;
  const bool activated = p.activation != LinearActivation::kNone;
  REPLAYSSM_CHECK(tile.parts == 1 || !activated, "parts=", tile.parts);
  NarrowCall call{};
  call.bias = p.bias;
  call.activation = p.activation;
  call.scale = p.scale;
  call.y = activated ? p.activated : p.y;
  call.outputs = static_cast<int>(p.out_features / (is_paired(p) ? 2 : 1));
  call.y_stride = activated ? call.outputs : p.y_head_stride;
  call.part_stride = p.rows * p.y_head_stride;
  call.y_dtype = activated ? p.dtype : DType::kFloat32;
  call.rows = static_cast<int>(p.rows);
  call.pieces = static_cast<int>((p.in_features + kPieceColumns - 1) / kPieceColumns);
  call.parts = tile.parts;
  switch (tile.weight_rows) {
    case 96: return launch_rows<96>(call, p, stream);
    case 144: return launch_rows<144>(call, p, stream);
    default: return launch_rows<192>(call, p, stream);
  }
}

}  // namespace replayssm::cuda
