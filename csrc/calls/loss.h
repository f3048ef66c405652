// What Python hands to the cross-entropy kernels of a CPU and of a GPU: transformer_kernels/ops/loss/_compiled.py names
// each field. Targets are int64 (rows,), losses fp32 (rows,), statistics fp32 (2, rows): the largest score of a row and
// 1 / the sum of its exponentials. weights: fp32 (classes + 1), the last one is their mean, or absent;
// z_loss, softcap 0: none.
#pragma once
#include "types.h"

namespace transformer_kernels {

// The losses of logits (rows, classes), whose rows are `stride` elements apart. With `dlogits`, contiguous or the
// logits themselves (on a GPU always these, and then without statistics), also the gradient of the sum of losses, or,
// where `count` is given, of their mean over the rows that are not ignored; their number goes to *count.
// `count`: CPU only.
struct CrossEntropyForward {
  int64_t dtype;  // of logits, dlogits: DTYPE_CODES
  Address logits, targets, losses, statistics, dlogits, count;
  int64_t rows, classes, stride, ignore_index;
  double smoothing;
  Address weights;
  double z_loss, softcap;
  int64_t device;
  Address stream;  // of a GPU

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("logits", logits), visit("targets", targets), visit("losses", losses);
    visit("statistics", statistics), visit("dlogits", dlogits), visit("count", count), visit("rows", rows);
    visit("classes", classes), visit("stride", stride), visit("ignore_index", ignore_index);
    visit("smoothing", smoothing), visit("weights", weights), visit("z_loss", z_loss), visit("softcap", softcap);
    visit("device", device), visit("stream", stream);
  }
};

// dlogits from dloss, fp32: of each row, or one number, divided by *count where that is given. scaled_afterwards, CPU
// only: the stored gradient is multiplied by dloss, as cross_entropy_scale does, to the same bits.
struct CrossEntropyBackward {
  int64_t dtype;
  Address dloss;
  bool dloss_of_each_row, scaled_afterwards;
  Address count, logits, targets, statistics, dlogits;
  int64_t rows, classes, ignore_index;
  double smoothing;
  Address weights;
  double z_loss, softcap;
  int64_t device;
  Address stream;

  template <class Visit> void fields(Visit&& visit) {
    visit("dtype", dtype), visit("dloss", dloss), visit("dloss_of_each_row", dloss_of_each_row);
    visit("scaled_afterwards", scaled_afterwards), visit("count", count), visit("logits", logits);
    visit("targets", targets), visit("statistics", statistics), visit("dlogits", dlogits), visit("rows", rows);
    visit("classes", classes), visit("ignore_index", ignore_index), visit("smoothing", smoothing);
    visit("weights", weights), visit("z_loss", z_loss), visit("softcap", softcap), visit("device", device);
    visit("stream", stream);
  }
};

// loss = the sum of the losses; with `count` *count = the rows that are not ignored, and the loss is their mean.
struct CrossEntropySum {
  Address losses, targets, loss, count;
  int64_t rows, ignore_index, device;
  Address stream;

  template <class Visit> void fields(Visit&& visit) {
    visit("losses", losses), visit("targets", targets), visit("loss", loss), visit("count", count), visit("rows", rows);
    visit("ignore_index", ignore_index), visit("device", device), visit("stream", stream);
  }
};

}  // namespace transformer_kernels
