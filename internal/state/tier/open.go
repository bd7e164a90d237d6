package tier

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// Exists reports whether the files of a plan were made.
func Exists(disk Disk, p Plan) (bool, error) {
	file, _, err := disk.Open(p.indexPath())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, file.Close()
}

// CheckRoom refuses files that do not fit beside each other, before the first one is made.
func CheckRoom(disk Disk, plans ...Plan) error {
	free, needed, first := map[uint64]ledger.Bytes{}, map[uint64]ledger.Bytes{}, map[uint64]string{}
	for _, p := range plans {
		for i, size := range p.Bytes() {
			room, system, err := disk.Room(p.Folders[i])
			if errors.Is(err, fs.ErrNotExist) {
				return fault.Inputf("the tier's folder %s does not exist", p.Folders[i]).
					WithHint("make it: mkdir -p " + p.Folders[i])
			}
			if err != nil {
				return fmt.Errorf("the tier's folder: %w", err)
			}
			free[system] = room
			needed[system] += size
			if first[system] == "" {
				first[system] = p.Folders[i]
			}
		}
	}
	for system, size := range needed {
		if size > free[system] {
			return fault.Inputf("the tier takes %v on the file system of %s, twice the state as each chunk has two "+
				"copies, but only %v are free there", size, first[system], free[system]).
				WithHint("free some room, or give a folder on another disk as well: --tier PATH,PATH")
		}
	}
	return nil
}

// Create makes the files of a shard that holds zeros. It removes what a creation that was broken off has left.
func Create(disk Disk, p Plan, memory Memory) (*Store, error) {
	s := newStore(p, memory)
	if _, err := rand.Read(s.identity[:]); err != nil {
		return nil, err
	}
	for i := range s.memory.Entries {
		s.memory.Entries[i].Store(nothing)
	}
	if err := s.create(disk); err != nil {
		err = errors.Join(err, s.Close())
		_ = disk.Remove(p.indexPath() + newSuffix) // it may not have been made
		_ = Remove(disk, p)                        // nor these
		return nil, err
	}
	return s, nil
}

func newStore(p Plan, memory Memory) *Store {
	s := &Store{plan: p, layout: newLayout(&p), memory: memory, committed: make([]uint64, p.EntryCount())}
	if len(memory.Entries) != p.EntryCount() || int64(len(memory.Area)) != p.AreaBytes() {
		panic("tier: memory of another size")
	}
	return s
}

func (s *Store) create(disk Disk) error {
	p := &s.plan
	for i, folder := range p.Folders {
		h := head{dataMagic, s.identity, [3]uint64{uint64(i), uint64(len(p.Folders)), uint64(s.layout.sizes[i])}, sum{}}
		file, err := makeFile(disk, p.dataPath(i), s.layout.sizes[i], h, nil)
		if err != nil {
			return err
		}
		s.data = append(s.data, file)
		if err := disk.SyncFolder(folder); err != nil {
			return err
		}
	}
	path := p.indexPath()
	h := head{indexMagic, s.identity, [3]uint64{uint64(len(p.Label)), uint64(s.layout.areas), uint64(len(p.Folders))},
		sum{}}
	file, err := makeFile(disk, path+newSuffix, s.layout.indexBytes(), h, p.Label)
	if err != nil {
		return err
	}
	s.index = renamed{file, path}
	if err := disk.Rename(path+newSuffix, path); err != nil {
		return err
	}
	return disk.SyncFolder(p.Folders[0])
}

type sum = [32]byte

// newSuffix ends the name of an index file that is being made.
const newSuffix = ".new"

// renamed is a file that has got another name.
type renamed struct {
	File
	name string
}

func (r renamed) Name() string { return r.name }

// makeFile makes a file with a head and what follows it.
func makeFile(disk Disk, path string, size int64, h head, rest []byte) (File, error) {
	if err := disk.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	file, err := disk.Create(path, size)
	if err != nil {
		return nil, err
	}
	block := aligned(Block + Round(int64(len(rest))))
	copy(block[Block:], rest)
	h.encode(block[:Block], rest)
	if err = writeAll(file, block, 0); err == nil {
		err = file.Sync()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), file.Close())
	}
	return file, nil
}

// aligned returns memory that direct I/O takes.
func aligned(size int64) []byte {
	memory := make([]byte, size+Block)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(memory))) % Block
	return memory[skip:][:size:size]
}

// Open opens files that were made before. suits refuses the label of another shard. If memory has entries of its own,
// [Store.Adopt] forgets them.
func Open(disk Disk, p Plan, memory Memory, suits func(label []byte) error) (*Store, error) {
	s := newStore(p, memory)
	if err := s.open(disk, suits); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Store) open(disk Disk, suits func(label []byte) error) error {
	if err := s.openIndex(disk, suits); err != nil {
		return fault.File(s.plan.indexPath()).Inputf("this tier cannot be opened: %v", err).
			WithHint("give another folder or, to begin anew there, remove the files " + s.plan.Name + ".*")
	}
	for i := range s.plan.Folders {
		if err := s.openData(disk, i); err != nil {
			return fault.File(s.plan.dataPath(i)).Inputf("this file of a tier cannot be opened: %v", err).
				WithHint("give the folders in the order in which they were given when the tier was made")
		}
	}
	return nil
}

// openIndex reads the index file.
func (s *Store) openIndex(disk Disk, suits func(label []byte) error) error {
	file, size, err := disk.Open(s.plan.indexPath())
	if err != nil {
		return err
	}
	s.index = file
	if err := s.settleIndex(disk); err != nil {
		return err
	}
	block := aligned(Block)
	if err := readAll(file, block, 0); err != nil {
		return err
	}
	h, err := decodeHead(block, indexMagic)
	if err != nil {
		return err
	}
	if h.numbers[0] > maximumLabel || Round(int64(h.numbers[0])) > size {
		return fmt.Errorf("it says that its label has %d bytes, and it has %d: %w", h.numbers[0], size, ErrDamaged)
	}
	label := aligned(Round(int64(h.numbers[0])))
	if err := readAll(file, label, Block); err != nil {
		return err
	}
	label = label[:h.numbers[0]]
	if err := h.verify(block, label); err != nil {
		return err
	}
	if err := suits(label); err != nil {
		return err
	}
	s.identity = h.identity
	s.layout.label = Round(int64(len(label)))
	if h.numbers[1] != uint64(s.layout.areas) || h.numbers[2] != uint64(s.layout.files) ||
		size != s.layout.indexBytes() {
		return fmt.Errorf("it was made for %d folders and an index of %d bytes, and has %d bytes: expected %d "+
			"folders, %d bytes and %d bytes", h.numbers[2], h.numbers[1], size, s.layout.files, s.layout.areas,
			s.layout.indexBytes())
	}
	return s.readAreas()
}

// settleIndex brings the index and its name to the disk. A process may have been killed after it had written them, and
// before it had done that: what is read here would not outlive a loss of power, and yet it is told to others.
func (s *Store) settleIndex(disk Disk) error {
	if err := s.index.Sync(); err != nil {
		return fmt.Errorf("bringing it to the disk: %w", err)
	}
	return disk.SyncFolder(s.plan.Folders[0])
}

// readAreas reads both areas, and keeps the later one in memory.
func (s *Store) readAreas() error {
	var last commit
	for turn := range uint64(2) {
		found, blank, err := s.readArea(turn)
		if err != nil {
			return err
		}
		s.torn = s.torn || found.generation == 0 && !blank
		if found.generation > last.generation {
			last, found = found, last
		}
		if found.generation+1 == last.generation {
			s.before = found
		}
	}
	if last.generation == 0 {
		return nil
	}
	if _, _, err := s.readArea(last.generation); err != nil {
		return err
	}
	return s.take(last)
}

// readArea reads the area of a commit into memory: the first copy that is whole. It returns the commit, or none and
// whether nothing was ever written there.
func (s *Store) readArea(generation uint64) (found commit, blank bool, err error) {
	blank = true
	for number := range areaCopies {
		if err := readAll(s.index, s.memory.Area, s.layout.area(generation, number)); err != nil {
			return commit{}, false, err
		}
		found, ok, empty := s.openArea(s.memory.Area)
		if ok && found.generation%2 == generation%2 {
			return found, false, nil
		}
		blank = blank && empty
	}
	return commit{}, blank, nil
}

// take makes the area in memory the last commit.
func (s *Store) take(c commit) error {
	for i := range s.committed {
		entry := s.word(s.plan.Sections + i)
		if _, ok := slotOf(entry); !ok && entry != nothing {
			return fmt.Errorf("the index of step %d says %#016x of a part: %w", c.steps, entry, ErrDamaged)
		}
		s.committed[i] = entry
	}
	s.last = c
	return nil
}

// openData opens a data file.
func (s *Store) openData(disk Disk, number int) error {
	file, size, err := disk.Open(s.plan.dataPath(number))
	if err != nil {
		return err
	}
	s.data = append(s.data, file)
	block := aligned(Block)
	if err := readAll(file, block, 0); err != nil {
		return err
	}
	h, err := decodeHead(block, dataMagic)
	if err != nil {
		return err
	}
	if err := h.verify(block, nil); err != nil {
		return err
	}
	own := [3]uint64{uint64(number), uint64(s.layout.files), uint64(s.layout.sizes[number])}
	if h.identity != s.identity || h.numbers != own || size != s.layout.sizes[number] {
		return errors.New("it belongs to other files than the index does")
	}
	return nil
}

// CanRollBack reports whether the state of one step before the last commit can be had.
func (s *Store) CanRollBack() bool {
	return !s.touched.Load() && s.before.generation > 0 && s.before.steps == s.last.steps-1
}

// MayRollBack refuses to go back to a number of steps that the commit before the last one does not have, or once
// something was written: then that state is being overwritten.
func (s *Store) MayRollBack(steps int64) error {
	if s.touched.Load() || s.before.generation == 0 {
		return errors.New("the state before is being overwritten already")
	}
	if s.before.generation != s.last.generation-1 || s.before.steps != steps {
		return fmt.Errorf("%s: it has no state of step %d: the last is of step %d", s.index.Name(), steps, s.last.steps)
	}
	return nil
}

// RollBack makes the state of the commit before the last one, which [Store.MayRollBack] has allowed, the one that the
// files hold. Shards that make steps together need it, where only some of them had committed the last step when the
// power was lost. If it fails, the files hold one of the two states, and have to be opened again.
func (s *Store) RollBack() error {
	last := s.last
	before, _, err := s.readArea(last.generation - 1)
	if err != nil {
		return err
	}
	if before != s.before {
		return fmt.Errorf("%s: the state of step %d: %w", s.index.Name(), s.before.steps, ErrDamaged)
	}
	if err := s.take(before); err != nil {
		return err
	}
	s.touched.Store(true)
	// From here on steps overwrite what the later commit says.
	for number := range areaCopies {
		if err := writeAll(s.index, aligned(Block), s.layout.area(last.generation, number)); err != nil {
			return err
		}
	}
	return s.index.Sync()
}

// Remove removes the files of a plan, the index first: what is left then is no tier.
func Remove(disk Disk, p Plan) error {
	paths := []string{p.indexPath()}
	for i := range p.Folders {
		paths = append(paths, p.dataPath(i))
	}
	var failed error
	for _, path := range paths {
		if err := disk.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = errors.Join(failed, err)
		}
		if failed == nil {
			failed = disk.SyncFolder(filepath.Dir(path))
		}
	}
	return failed
}

// Folders checks and returns the folders of a list, as absolute paths.
func Folders(list []string) ([]string, error) {
	var folders []string
	for _, path := range list {
		info, err := os.Stat(path)
		switch {
		case path == "":
			return nil, fault.Inputf("--tier has an empty path: expected folders, with commas between them")
		case errors.Is(err, fs.ErrNotExist):
			return nil, fault.Inputf("--tier: the folder %s does not exist", path).WithHint("make it: mkdir -p " + path)
		case err != nil:
			return nil, &fault.Input{What: "--tier", Err: err}
		case !info.IsDir():
			return nil, fault.Inputf("--tier: %s is a file, expected a folder", path)
		}
		full, err := filepath.Abs(path)
		if err != nil {
			return nil, err
		}
		folders = append(folders, full)
	}
	return folders, nil
}
