/* Terrace for C, under the name that programs outside of its tree include: <terrace/terrace.h>. */
#include "hooks/c_abi/terrace.h"
