//go:build !linux

package files

// nonblocking is the flag with which a file is opened without waiting for another process. Elsewhere than on Linux only
// the check of the path keeps pipes and devices away.
const nonblocking = 0

// ReadKernel reads a copy of a file of /proc or /sys. Errors are of type *fs.PathError.
func ReadKernel(path string) ([]byte, error) { return Read(path, kernelLimit) }
