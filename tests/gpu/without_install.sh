# Sourced by the session scripts, for machines where nothing of this project is installed.

# use_checkout ROOT PACKAGE...: makes ROOT's packages importable as overstory.PACKAGE, and known to
# SGLang as its plugin (on $work/plugin). Sets $work, a folder that is nobody else's, and leaves the
# script in an empty one: in the checkout `kernels` would hide another package.
use_checkout() {
  local root=$1 package
  shift
  work=$(mktemp -d)
  mkdir -p "$work/links/overstory" "$work/plugin/overstory-0.1.0.dist-info"
  for package in "$@"; do ln -s "$root/$package" "$work/links/overstory/$package"; done
  # What SGLang finds its plugins by.
  printf 'Metadata-Version: 2.1\nName: overstory\nVersion: 0.1.0\n' \
    >"$work/plugin/overstory-0.1.0.dist-info/METADATA"
  printf '[sglang.srt.plugins]\noverstory = overstory.workers.seam.plugin:register\n' \
    >"$work/plugin/overstory-0.1.0.dist-info/entry_points.txt"
  export PATH=$PATH:/usr/local/cuda/bin
  export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  export PYTHONPATH=$work/links${PYTHONPATH:+:$PYTHONPATH}
  cd "$work/links" || exit 1
}

# use_modules MODULES: what slice_modules.sh built is found instead of being compiled. An absolute path.
use_modules() {
  local modules=$1
  export TVM_FFI_CACHE_DIR=$modules/tvm-ffi PYTHONPATH=$modules/python:$PYTHONPATH
  export OVERSTORY_KERNEL_CACHE=$modules/overstory
  [ ! -d "$modules/triton" ] || export TRITON_CACHE_DIR=$modules/triton
}

# build_kernels PYTHON: for the GPU of this machine; prints what the build says.
build_kernels() {
  "$1" -m overstory.kernels.build --arch "sm_$(nvidia-smi --query-gpu=compute_cap \
    --format=csv,noheader --id=0 | tr -d .)"
}

# leave_out_models PYTHON: models that no engine here needs cost seconds to import.
leave_out_models() {
  SGLANG_DISABLED_MODEL_ARCHS=$("$1" -c 'from overstory.workers.environment import *
print(rank_environment("cpu")["SGLANG_DISABLED_MODEL_ARCHS"])')
  export SGLANG_DISABLED_MODEL_ARCHS
}
