/* A driver for no device. libcudnn's planner links against libcuda.so.1 and looks its functions up, yet to
   plan for a described GPU it calls next to none of them. Questions about devices are answered with
   CUDA_ERROR_NO_DEVICE; loading a kernel "succeeds" with a handle that nothing can launch, so that a plan
   can be finished and its workspace told. Signatures: CUDA driver API; the arguments that are not written
   are left out, which the calling convention allows. */

enum { SUCCESS = 0, NO_DEVICE = 100 };

static int nothing_to_launch;

static int give_handle(void **handle) {
    *handle = &nothing_to_launch;
    return SUCCESS;
}

#define NONE(name) int name(void) { return NO_DEVICE; }
#define DONE(name) int name(void) { return SUCCESS; }
#define GIVE(name) int name(void **handle) { return give_handle(handle); }
#define TELL(name) int name(int error, const char **text) { (void)error; *text = "no driver"; return SUCCESS; }

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuKernelGetAttribute(int *value) { *value = 0; return SUCCESS; }
TELL(cuGetErrorName)
TELL(cuGetErrorString)

NONE(cuDeviceGet)
NONE(cuDeviceGetCount)
NONE(cuCtxGetCurrent)
NONE(cuCtxGetLimit)
NONE(cuCtxPopCurrent)
NONE(cuCtxPushCurrent)
NONE(cuStreamGetCtx)
NONE(cuLaunchKernel)
NONE(cuLaunchKernelEx)
NONE(cuLaunchCooperativeKernel)
NONE(cuOccupancyMaxPotentialClusterSize)
NONE(cuLinkComplete)

GIVE(cuLibraryLoadData)
GIVE(cuLibraryLoadFromFile)
GIVE(cuLibraryGetKernel)
GIVE(cuKernelGetFunction)
GIVE(cuModuleLoadData)
GIVE(cuModuleGetFunction)
GIVE(cuLinkCreate)

DONE(cuLibraryUnload)
DONE(cuModuleUnload)
DONE(cuKernelSetAttribute)
DONE(cuLinkAddData)
DONE(cuLinkDestroy)
DONE(cuTensorMapEncodeIm2col)
DONE(cuTensorMapEncodeTiled)
