/* Not cuDNN: it only says to be one. cudnn-frontend 1.20 to 1.25 check a graph against their own rules
   before they call the library, and all they ask of it is its version. ATTNSEL_CUDNN_VERSION holds that
   number as cudnnGetVersion counts (90100 is 9.1.0). */

#include <stdlib.h>

unsigned long cudnnGetVersion(void) {
    const char *number = getenv("ATTNSEL_CUDNN_VERSION");
    return number ? strtoul(number, 0, 10) : 0;
}

unsigned long cudnnGetCudartVersion(void) { return 12000; }
const char *cudnnGetErrorString(int status) { (void)status; return "no cuDNN, only its version"; }
void cudnnGetLastErrorString(char *message, unsigned long size) { if (size) message[0] = 0; }
