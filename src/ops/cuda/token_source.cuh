// Where blocks that take token after token have them from.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/token_rows.h"

namespace replayssm::cuda {

// A row of activations: element i of it is element at + i of `data`.
struct Place {
  const void* data;
  int64_t at;
};

// The window's tokens.
class WindowTokens {
 public:
  __device__ WindowTokens(const RecurrentStepParams& p, const TokenLaunch& launch, int, int token,
                          int)
      : p_(p), launch_(launch), token_(token) {}

  __device__ Place key(int n, int key_head) const {
    return {p_.k, (token_ + n) * p_.k_stride + int64_t{key_head} * launch_.state_dim};
  }
  __device__ Place query(int n, int key_head) const {
    return {p_.q, (token_ + n) * p_.q_stride + int64_t{key_head} * launch_.state_dim};
  }
  __device__ Place value(int n, int head) const {
    return {p_.v, (token_ + n) * p_.v_stride + int64_t{head} * launch_.head_dim};
  }
  __device__ Place output_gate(int n, int head) const {
    return {p_.z, (token_ + n) * p_.z_stride + int64_t{head} * launch_.head_dim};
  }
  // Kimi Delta's.
  __device__ Place gate(int n, int head) const {
    return {p_.gate, (token_ + n) * p_.gate_stride + int64_t{head} * launch_.state_dim};
  }
  __device__ float strength(int n, int head) const { return p_.b[scalar(n, head)]; }
  __device__ float log_decay(int n, int head) const { return p_.g[scalar(n, head)]; }
  // Whether it has an output.
  __device__ static bool is_new(int) { return true; }

 private:
  __device__ int64_t scalar(int n, int head) const {
    return (int64_t{token_} + n) * launch_.heads + head;
  }

  const RecurrentStepParams& p_;
  const TokenLaunch& launch_;
  const int64_t token_;
};

// The rows of the ring that a step folds or reads, oldest first, then the window's tokens.
class RingTokens {
 public:
  // Reads the cursor.
  __device__ RingTokens(const RecurrentStepParams& p, const TokenLaunch& launch, int slot,
                        int token, int window)
      : p_(p), launch_(launch), window_(p, launch, slot, token, window) {
    if (slot < 0) return;
    const Cursor& cursor = p.batch.cursors[slot];
    const int rows = static_cast<int>(launch.ring_rows.divisor);
    first_counter = cursor.ring_start - cursor.fold_count;
    history = min(max(cursor.fold_count + cursor.ring_count, 0), rows - window);
    folded = min(max(cursor.fold_count, 0), history);
    first_row_ = int64_t{slot} * rows;
    first_ = static_cast<int>(launch.ring_rows.modulo64(first_counter));
  }

  __device__ Place key(int n, int key_head) const {
    if (is_new(n)) return window_.key(n - history, key_head);
    return {p_.state.ring_k, (row(n) * launch_.key_heads + key_head) * launch_.state_dim};
  }
  // Of a token of the ring, any.
  __device__ Place query(int n, int key_head) const {
    return is_new(n) ? window_.query(n - history, key_head) : key(n, key_head);
  }
  __device__ Place value(int n, int head) const {
    if (is_new(n)) return window_.value(n - history, head);
    return {p_.state.ring_v, scalar(n, head) * launch_.head_dim};
  }
  __device__ Place output_gate(int n, int head) const {
    return window_.output_gate(n - history, head);
  }
  __device__ Place gate(int n, int head) const {
    if (is_new(n)) return window_.gate(n - history, head);
    return {p_.state.ring_gate, scalar(n, head) * launch_.state_dim};
  }
  __device__ float strength(int n, int head) const {
    return is_new(n) ? window_.strength(n - history, head) : p_.state.ring_b[scalar(n, head)];
  }
  __device__ float log_decay(int n, int head) const {
    return is_new(n) ? window_.log_decay(n - history, head) : p_.state.ring_g[scalar(n, head)];
  }
  __device__ bool is_new(int n) const { return n >= history; }
  // The ring's row of token n; of that row, what one head has.
  __device__ int64_t row(int n) const {
    const int at = first_ + n, rows = static_cast<int>(launch_.ring_rows.divisor);
    return first_row_ + (at < rows ? at : at - rows);
  }
  __device__ int64_t scalar(int n, int head) const { return row(n) * launch_.heads + head; }

  int64_t first_counter = 0;    // of the oldest row
  int history = 0, folded = 0;  // rows of the ring; those that the step folds

 private:
  const RecurrentStepParams& p_;
  const TokenLaunch& launch_;
  const WindowTokens window_;
  int64_t first_row_ = 0;
  int first_ = 0;
};

}  // namespace replayssm::cuda
