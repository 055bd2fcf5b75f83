/* Not cuBLASLt: it only says to be one. From 9.26 on libcudnn's planner asks for its version, and aborts
   the process when it is not there; it multiplies nothing while it plans attention. */

unsigned long cublasLtGetVersion(void) { return 120900; }
unsigned long cublasLtGetCudartVersion(void) { return 12090; }
