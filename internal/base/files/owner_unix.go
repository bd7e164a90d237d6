//go:build unix

package files

import (
	"io/fs"
	"os"
	"syscall"
)

// takeOwner gives a file an owner and a group. Only root may give files away, and others keep theirs.
func takeOwner(file *os.File, from fs.FileInfo) {
	if owner, ok := from.Sys().(*syscall.Stat_t); ok {
		_ = file.Chown(int(owner.Uid), int(owner.Gid))
	}
}
