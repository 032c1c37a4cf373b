// The recurrent states of all sequences: checkpoints, rings, convolution inputs and cursors, by
// slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/buffer.h"
#include "model/config.h"
#include "replayssm/ops.h"

namespace replayssm {

// Throws Error for a read copy that no step would read, or that is no smaller than what it copies.
void check_read_copy(DType read_dtype, DType checkpoint_dtype, Route route);

class SlotPool {
 public:
  // read_dtype: of the read copies, if there are to be any. snapshots: of how many tokens a state
  // is kept besides the checkpoint (StateView::snapshots).
  SlotPool(const ModelConfig& config, const RingConfig& ring, DType checkpoint_dtype,
           DType activation_dtype, int32_t slots, std::optional<DType> read_dtype = {},
           Memory& memory = host_memory(), int64_t snapshots = 0);

  // What one slot takes, all layers together.
  static int64_t bytes_per_slot(const ModelConfig& config, const RingConfig& ring,
                                DType checkpoint_dtype, DType activation_dtype,
                                std::optional<DType> read_dtype = {}, int64_t snapshots = 0);

  int32_t slots() const { return static_cast<int32_t>(cursors_.size()); }
  int64_t bytes() const { return bytes_; }
  const RingConfig& ring() const { return ring_; }
  const std::vector<RecurrentState>& recurrent() const { return recurrent_; }
  const std::vector<void*>& conv_inputs() const { return conv_inputs_; }
  const std::vector<void*>& snapshots() const { return snapshots_; }  // empty without
  Cursor* cursors() const { return cursors_.data(); }  // [slots], in the pool's memory
  Cursor cursor(int32_t slot) const;
  void set_cursor(int32_t slot, const Cursor& cursor);

  // Takes a free slot, zeroed and reset; -1 when there is none.
  int32_t acquire();
  void release(int32_t slot);

  // Snapshots: what is left of a slot whose ring is empty, in the pool's memory.
  int64_t snapshot_bytes() const;
  void save_snapshot(int32_t slot, std::byte* to);
  // Into a slot just acquired, which then stands behind a prefill of `tokens` tokens.
  void load_snapshot(int32_t slot, const std::byte* from, int64_t tokens);

  // All of a slot, on the host.
  int64_t slot_bytes() const { return bytes_ / slots() + static_cast<int64_t>(sizeof(Cursor)); }
  void read_slot(int32_t slot, std::byte* host) const;
  void write_slot(int32_t slot, const std::byte* host);

 private:
  // One of the layers' arrays, all layers one behind another.
  struct LayerMemory {
    Buffer memory;
    int64_t slot_bytes = 0, layer_stride = 0;
    bool ring = false;
  };

  RingConfig ring_;
  Memory& memory_;
  std::vector<RecurrentState> recurrent_;
  std::vector<void*> conv_inputs_, snapshots_;
  Array<Cursor> cursors_;
  std::vector<int32_t> free_;
  std::vector<bool> taken_;
  std::vector<LayerMemory> arrays_;  // behind the views
  int64_t bytes_ = 0;
};

}  // namespace replayssm
