//go:build linux

package service

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/arena"
	"plimsoll/internal/state/service/protocol"
)

// A service in folders needs neither sockets nor memfds, where a sandbox forbids them. Clients meet it at a named pipe
// ([protocol.PipeListener]), arenas are files, and the folders keep these: the service that is started next finds them
// there, also after the death of all processes. Files do not survive the host's death as a whole: what the kernel had
// written of them is of different instants. So the first folder has the boot of the host, and a keeper refuses files of
// another one.

const (
	notifyName = "notify" // of the pipe by which the service tells its keeper that it lives
	ownerName  = "owner"  // of the number of the process that started the keeper
	bootName   = "boot"
	bootFile   = "/proc/sys/kernel/random/boot_id"
)

// folderPatience is how long a keeper waits for the one before it, whose trainer has died, to end.
var folderPatience = 20 * time.Second

// UseFolders has the sessions of the service in folders: new ones in the first that has room. It finds those that an
// earlier service has left.
func (in *Inherited) UseFolders(folders []string) error {
	for _, folder := range folders {
		place := arena.Place(folder)
		in.folders = append(in.folders, place)
		entries, err := os.ReadDir(folder)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := place.RemoveUnnamed(); err != nil {
			return err
		}
		for _, entry := range entries {
			if !keptPattern.MatchString(entry.Name()) {
				continue
			}
			file, _, err := files.OpenFile(filepath.Join(folder, entry.Name()), os.O_RDWR|unix.O_NOFOLLOW, 0)
			if err != nil {
				return err
			}
			in.Files[entry.Name()] = file
		}
	}
	if in.store != nil {
		in.store.folders = in.folders
	}
	return nil
}

// inFolders reports whether arenas are files in folders.
func (in *Inherited) inFolders() bool { return len(in.folders) > 0 }

// placeOf returns where the arenas of a new session are, and their pages.
func (in *Inherited) placeOf(plans []arena.Plan, pages arena.Pages) (arena.Place, arena.Pages, error) {
	if !in.inFolders() {
		return arena.Memory, pages, nil
	}
	var needed ledger.Bytes
	for _, plan := range plans {
		needed += arena.BasePages.Round(plan.Size)
	}
	var lacking []string
	for _, place := range in.folders {
		free, err := roomIn(string(place))
		switch {
		case err != nil:
			lacking = append(lacking, fmt.Sprintf("%s: %v", place, err))
		case free < needed+reserveOfFolder:
			lacking = append(lacking, fmt.Sprintf("%s (%s) has %v", place, fileSystem(string(place)), free))
		default:
			return place, arena.BasePages, nil
		}
	}
	return "", 0, protocol.DoesNotFit.Errorf("the files of the session take %v, and no folder has room: %s; name one "+
		"that has (PLIMSOLL_FOLDER, or --folder)", needed, strings.Join(lacking, "; "))
}

// reserveOfFolder is left for the session header and for what clients bring.
const reserveOfFolder = 24 * ledger.MiB

// roomIn makes a folder if need be, and returns how many bytes its file system has for this user.
func roomIn(folder string) (ledger.Bytes, error) {
	if _, err := privateDirectory(folder); err != nil {
		return 0, err
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(folder, &stat); err != nil {
		return 0, err
	}
	return ledger.Bytes(stat.Bavail) * ledger.Bytes(stat.Bsize), nil
}

// placeOfFile returns the place of an arena's file.
func (in *Inherited) placeOfFile(file *os.File) arena.Place {
	if !in.inFolders() {
		return arena.Memory
	}
	return arena.Place(filepath.Dir(file.Name()))
}

// newFile returns a file with a text, for a client to read.
func (in *Inherited) newFile(name string, text []byte) (*os.File, error) {
	if !in.inFolders() {
		return protocol.SealedFile(name, text)
	}
	file, err := os.CreateTemp(string(in.folders[0]), "text-")
	if err != nil {
		return nil, err
	}
	_, err = file.Write(text)
	return file, errors.Join(err, os.Remove(file.Name()))
}

// tellOfDisk warns of a state whose files are not in memory: the kernel writes to the disk what steps change.
func (s *Server) tellOfDisk(made *session) {
	if made.place == arena.Memory {
		return
	}
	switch name := fileSystem(string(made.place)); name {
	case "tmpfs", "ramfs":
	default:
		s.logf("session %v is in files of %s (%s): the kernel also writes what steps change to its disk, and steps "+
			"may wait for it; PLIMSOLL_FOLDER or --folder names a folder in memory", keyOf(made.document),
			made.place, name)
	}
}

// removeFrom removes a file from the folder that has it.
func removeFrom(folders []arena.Place, name string) error {
	var failed error
	for _, folder := range folders {
		if err := os.Remove(filepath.Join(string(folder), name)); !errors.Is(err, os.ErrNotExist) {
			failed = errors.Join(failed, err)
		}
	}
	return failed
}

// tell writes a message to the keeper's pipe, and an empty line behind it.
func (s *store) tell(text string) error {
	_, err := s.pipe.WriteString(text + "\n\n")
	return err
}

// listenInFolders makes the named pipe of the first folder, which is the keeper's until it closes.
func (k *Keeper) listenInFolders() error {
	folder := k.Folders[0]
	if _, err := privateDirectory(folder); err != nil {
		return err
	}
	if err := k.lockFolder(folder); err != nil {
		return err
	}
	if err := checkBoot(folder); err != nil {
		return err
	}
	entries, err := os.ReadDir(folder)
	for _, entry := range entries {
		if protocol.ClientPipes(entry.Name()) {
			err = errors.Join(err, os.Remove(filepath.Join(folder, entry.Name())))
		}
	}
	if err == nil {
		k.listener, err = protocol.ListenAtPipe(folder)
	}
	return err
}

// lockFolder waits for a keeper whose trainer has died, as it finishes the step under way.
func (k *Keeper) lockFolder(folder string) error {
	directory, err := os.Open(folder)
	if err != nil {
		return err
	}
	k.locked = directory
	owner := filepath.Join(folder, ownerName)
	until := time.Now().Add(folderPatience)
	for {
		err := unix.Flock(int(directory.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return os.WriteFile(owner, []byte(strconv.Itoa(os.Getppid())), 0o600)
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if time.Now().After(until) || lives(owner) {
			return fmt.Errorf("another service has its state in %s: give this job another name, or another folder",
				folder)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// lives reports whether the process lives whose number is in a file.
func lives(file string) bool {
	text, err := files.Read(file, 32)
	if err != nil {
		return false // the keeper that holds the lock is about to write it, or has removed the folder
	}
	number, err := strconv.Atoi(string(text))
	if err != nil {
		return false
	}
	process, err := procfs.NewProc(number)
	if err != nil {
		return false
	}
	status, err := process.Stat()
	return err == nil && status.State != "Z" && status.State != "X"
}

// checkBoot refuses files from before the host was started again.
func checkBoot(folder string) error {
	now, err := files.ReadKernel(bootFile)
	if err != nil {
		return err
	}
	name := filepath.Join(folder, bootName)
	then, err := files.Read(name, 1<<10)
	if errors.Is(err, os.ErrNotExist) {
		return os.WriteFile(name, now, 0o600)
	}
	if err != nil {
		return err
	}
	if !bytes.Equal(then, now) {
		return fmt.Errorf("%s has the state of a job that ran before this host was started, or on another host: its "+
			"files may be of different instants; remove the folder, and go on from the last checkpoint", folder)
	}
	return nil
}

// readPipe takes the messages of a service until it ends.
func (k *Keeper) readPipe(pipe *os.File) {
	defer pipe.Close()
	lines := bufio.NewScanner(pipe)
	message := ""
	for lines.Scan() {
		if message += lines.Text() + "\n"; lines.Text() == "" {
			k.take(parseNotification(message), nil)
			message = ""
		}
	}
}

// UntilClosed returns when a pipe that the trainer holds has closed. It reports whether the trainer has said that the
// state in the folders shall outlive it.
func UntilClosed(pipe io.Reader) (keep bool) {
	words := bufio.NewScanner(pipe)
	for words.Scan() {
		switch words.Text() {
		case "keep":
			keep = true
		case "discard":
			keep = false
		}
	}
	return keep
}

// Discard removes the folders, with the state in them.
func (k *Keeper) Discard() error {
	var err error
	for _, folder := range k.Folders {
		err = errors.Join(err, os.RemoveAll(folder))
	}
	return err
}

// fileSystems have the names of file systems, from linux/magic.h.
var fileSystems = map[int64]string{
	unix.TMPFS_MAGIC: "tmpfs", unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs",
	unix.BTRFS_SUPER_MAGIC: "btrfs", unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.NFS_SUPER_MAGIC: "nfs",
	unix.RAMFS_MAGIC: "ramfs", 0x2fc12fc1: "zfs",
	unix.FUSE_SUPER_MAGIC: "fuse", 0x01021997: "9p",
}

// fileSystem names the file system of a folder.
func fileSystem(folder string) string {
	var stat unix.Statfs_t
	if err := unix.Statfs(folder, &stat); err != nil {
		return "unknown"
	}
	if name, ok := fileSystems[int64(stat.Type)]; ok {
		return name
	}
	return fmt.Sprintf("file system %#x", stat.Type)
}
