//go:build linux

package powerloss

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// operation is what a program does to a file system.
type operation struct {
	kind     kind
	id       int // of the file or folder that is changed; of a folder, where a name is
	name, to string
	made     int // the file or folder that gets a name
	isFolder bool
	offset   int64 // of a write; the size that a file is cut to
	data     []byte
}

var kinds = [...]string{"make", "remove", "rename", "exchange", "write", "cut", "lengthen", "sync data of",
	"sync names of"}

func (o operation) String() string {
	switch o.kind {
	case makeName:
		return fmt.Sprintf("make %q in folder %d, which is %d", o.name, o.id, o.made)
	case removeName, changeName, exchangeNames:
		return strings.TrimSpace(fmt.Sprintf("%s %s in folder %d %s", kinds[o.kind], o.name, o.id, o.to))
	case write:
		return fmt.Sprintf("write %d bytes to %d at %d", len(o.data), o.id, o.offset)
	case cut, lengthen:
		return fmt.Sprintf("%s %d to %d", kinds[o.kind], o.id, o.offset)
	}
	return fmt.Sprintf("%s %d", kinds[o.kind], o.id)
}

type kind uint8

const (
	makeName kind = iota
	removeName
	changeName
	exchangeNames
	write
	cut
	lengthen
	syncData  // brings the data of a file to the disk
	syncNames // brings the names of a folder to the disk
)

// recorder is a file system in a folder, which records what reaches it.
type recorder struct {
	mutex sync.Mutex // an operation is made and recorded at once
	log   []operation
	ids   map[uint64]int // of files and folders, by inode
	next  int
	plain bool // it cannot exchange two names, like NFS
}

// top is the number of the folder that is mounted.
const top = 0

// mount mounts the file system and returns where it is.
func (r *recorder) mount(t *testing.T) string {
	t.Helper()
	beneath, path := t.TempDir(), t.TempDir()
	var st syscall.Stat_t
	if err := syscall.Stat(beneath, &st); err != nil {
		t.Fatal(err)
	}
	r.ids, r.next = map[uint64]int{st.Ino: top}, top+1
	root := &fs.LoopbackRoot{Path: beneath, Dev: st.Dev}
	root.NewNode = func(root *fs.LoopbackRoot, _ *fs.Inode, _ string, _ *syscall.Stat_t) fs.InodeEmbedder {
		return &node{LoopbackNode: fs.LoopbackNode{RootData: root}, recorder: r}
	}
	root.RootNode = root.NewNode(root, nil, "", &st)
	server, err := fs.Mount(path, root.RootNode, &fs.Options{MountOptions: fuse.MountOptions{DirectMount: true}})
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("no file system can be mounted: %v", err)
		}
		t.Skipf("no file system can be mounted: %v; it takes /dev/fuse, and root or fusermount3", err)
	}
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Errorf("unmounting: %v", err)
		}
	})
	return path
}

// length returns how many operations there were.
func (r *recorder) length() int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return len(r.log)
}

// settle brings all that there is to the disk.
func (r *recorder) settle() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for id := range r.next {
		r.log = append(r.log, operation{kind: syncData, id: id}, operation{kind: syncNames, id: id})
	}
}

// record makes an operation, and records it if it was made.
func (r *recorder) record(o operation, do func() syscall.Errno) syscall.Errno {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	errno := do()
	if errno == 0 {
		r.log = append(r.log, o)
	}
	return errno
}

// make makes a file or folder, and records its name. It forgets what had the inode before.
func (r *recorder) make(folder *node, name string, isFolder bool, do func() (inode uint64, errno syscall.Errno)) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	inode, errno := do()
	if errno != 0 {
		return
	}
	r.ids[inode] = r.next
	r.log = append(r.log, operation{kind: makeName, id: r.ids[folder.inode()], name: name, made: r.next,
		isFolder: isFolder})
	r.next++
}

// node is a file or a folder.
type node struct {
	fs.LoopbackNode
	recorder *recorder
}

func (n *node) inode() uint64 { return n.StableAttr().Ino }

// id is the number of the node. The caller must not hold the recorder.
func (n *node) id() int {
	n.recorder.mutex.Lock()
	defer n.recorder.mutex.Unlock()
	return n.recorder.ids[n.inode()]
}

func (n *node) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (
	child *fs.Inode, file fs.FileHandle, fuseFlags uint32, errno syscall.Errno,
) {
	n.recorder.make(n, name, false, func() (uint64, syscall.Errno) {
		child, file, fuseFlags, errno = n.LoopbackNode.Create(ctx, name, flags|syscall.O_EXCL, mode, out)
		return out.Ino, errno
	})
	return child, recorded(file), fuseFlags, errno
}

func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	file, fuseFlags, errno := n.LoopbackNode.Open(ctx, flags)
	return recorded(file), fuseFlags, errno
}

// openFile is a file whose writes the kernel does not make by itself.
type openFile struct{ *fs.LoopbackFile }

func (openFile) PassthroughFd() (int, bool) { return 0, false }

func recorded(file fs.FileHandle) fs.FileHandle {
	if inner, ok := file.(*fs.LoopbackFile); ok {
		return openFile{inner}
	}
	return file
}

func (n *node) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (
	child *fs.Inode, errno syscall.Errno,
) {
	n.recorder.make(n, name, true, func() (uint64, syscall.Errno) {
		child, errno = n.LoopbackNode.Mkdir(ctx, name, mode, out)
		return out.Ino, errno
	})
	return child, errno
}

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno {
	return n.recorder.record(operation{kind: removeName, id: n.id(), name: name},
		func() syscall.Errno { return n.LoopbackNode.Unlink(ctx, name) })
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno {
	return n.recorder.record(operation{kind: removeName, id: n.id(), name: name},
		func() syscall.Errno { return n.LoopbackNode.Rmdir(ctx, name) })
}

// Rename renames within a folder. The code under test needs no more.
func (n *node) Rename(
	ctx context.Context, name string, to fs.InodeEmbedder, newName string, flags uint32,
) syscall.Errno {
	if to.EmbeddedInode() != n.EmbeddedInode() {
		return syscall.EXDEV
	}
	kind := changeName
	if flags&fs.RENAME_EXCHANGE != 0 {
		if n.recorder.plain {
			return syscall.EINVAL
		}
		kind = exchangeNames
	}
	return n.recorder.record(operation{kind: kind, id: n.id(), name: name, to: newName},
		func() syscall.Errno { return n.LoopbackNode.Rename(ctx, name, to, newName, flags) })
}

func (n *node) Write(
	ctx context.Context, file fs.FileHandle, data []byte, offset int64,
) (written uint32, errno syscall.Errno) {
	o := operation{kind: write, id: n.id(), offset: offset, data: bytes.Clone(data)}
	errno = n.recorder.record(o, func() (errno syscall.Errno) {
		written, errno = file.(fs.FileWriter).Write(ctx, data, offset)
		return errno
	})
	return written, errno
}

func (n *node) Setattr(ctx context.Context, file fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	set := func() syscall.Errno { return n.LoopbackNode.Setattr(ctx, file, in, out) }
	if size, ok := in.GetSize(); ok {
		return n.recorder.record(operation{kind: cut, id: n.id(), offset: int64(size)}, set)
	}
	return set()
}

// Allocate lengthens a file.
func (n *node) Allocate(ctx context.Context, file fs.FileHandle, offset, size uint64, mode uint32) syscall.Errno {
	if mode != 0 {
		return syscall.EOPNOTSUPP
	}
	return n.recorder.record(operation{kind: lengthen, id: n.id(), offset: int64(offset + size)},
		func() syscall.Errno { return file.(fs.FileAllocater).Allocate(ctx, offset, size, mode) })
}

func (n *node) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	return n.recorder.record(operation{kind: syncData, id: n.id()}, func() syscall.Errno { return 0 })
}

// openFolder is an open folder.
type openFolder struct {
	fs.FileReaddirenter
	fs.FileSeekdirer
	fs.FileReleasedirer
	node *node
}

func (f openFolder) Fsyncdir(context.Context, uint32) syscall.Errno {
	return f.node.recorder.record(operation{kind: syncNames, id: f.node.id()}, func() syscall.Errno { return 0 })
}

func (n *node) OpendirHandle(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	inner, fuseFlags, errno := n.LoopbackNode.OpendirHandle(ctx, flags)
	if errno != 0 {
		return nil, 0, errno
	}
	folder := openFolder{inner.(fs.FileReaddirenter), inner.(fs.FileSeekdirer), inner.(fs.FileReleasedirer), n}
	return folder, fuseFlags, 0
}

// The code under test does without these, or has another way where a file system lacks them.

func (n *node) Link(context.Context, fs.InodeEmbedder, string, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return nil, syscall.EOPNOTSUPP
}

func (n *node) Symlink(context.Context, string, string, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return nil, syscall.EOPNOTSUPP
}

func (n *node) Mknod(context.Context, string, uint32, uint32, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return nil, syscall.EOPNOTSUPP
}

func (n *node) Tmpfile(context.Context, uint32, uint32, *fuse.EntryOut) (
	*fs.Inode, fs.FileHandle, uint32, syscall.Errno,
) {
	return nil, nil, 0, syscall.EOPNOTSUPP
}

func (n *node) CopyFileRange(context.Context, fs.FileHandle, uint64, *fs.Inode, fs.FileHandle, uint64, uint64, uint64) (
	uint32, syscall.Errno,
) {
	return 0, syscall.ENOSYS
}
