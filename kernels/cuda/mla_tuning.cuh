// Other ways of the attention kernel's loop, each behind one constant. With none of them defined it is
// the kernel that was timed (docs/kernels-attention.md, "Awaiting their timing").
#pragma once

#ifndef OVERSTORY_MLA_LEAN
#define OVERSTORY_MLA_LEAN 0
#endif
#ifndef OVERSTORY_MLA_WHOLE_VALUES
#define OVERSTORY_MLA_WHOLE_VALUES 0
#endif

namespace overstory::mla {

// Fewer instructions on a warp's way: weights are computed while the vote on maxima is under way, what
// moved is said only when something did, one offset of a lane serves keys and values.
constexpr bool kLean = OVERSTORY_MLA_LEAN != 0;

// A warp's values not by halves of its columns, so that it reads weights once and not twice.
constexpr bool kWholeValues = OVERSTORY_MLA_WHOLE_VALUES != 0;

}  // namespace overstory::mla
