package host

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/tools/txtar"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
)

// maxRecord is far above any recorded machine: a machine of 1,000 CPUs has up to 2.5 MB.
const maxRecord = 64 << 20

// Root returns a file system to discover and the affinity mask that goes with it. An empty name means this process.
// Otherwise the name is a directory that holds proc and sys, or a file that Record wrote. A directory may hold the
// mask in a file "affinity"; without one the mask is as wide as the other files allow.
func Root(name string) (fs.FS, cpuset.CPUSet, error) {
	if name == "" {
		// The mask of the calling thread. The main thread may be a worker of this process, bound to one CPU.
		affinity, err := Affinity(0)
		return directory{os.DirFS("/"), "/"}, affinity, err
	}
	bad := func(err error) error {
		var failed *fs.PathError
		if errors.As(err, &failed) {
			err = failed.Err // the message already has the name
		}
		return &fault.Input{Where: fault.Position{File: name}, Err: err,
			Hint: "give a directory that holds proc and sys, or a file that plimsoll topology --record wrote"}
	}
	info, err := os.Stat(name)
	if err != nil {
		return nil, cpuset.New(), bad(err)
	}
	root := fs.FS(directory{os.DirFS(name), name})
	if !info.IsDir() {
		text, err := files.Read(name, maxRecord)
		if err != nil {
			return nil, cpuset.New(), bad(err)
		}
		if root, err = txtar.FS(txtar.Parse(text)); err != nil {
			return nil, cpuset.New(), bad(err)
		}
	}
	affinity, err := tree{root}.affinity()
	if err == nil && affinity.IsEmpty() {
		err = errors.New("no CPU is recorded here")
	}
	if err != nil {
		return nil, cpuset.New(), bad(err)
	}
	return root, affinity, nil
}

// affinity returns the mask of a recorded process.
func (t tree) affinity() (cpuset.CPUSet, error) {
	if text := t.text("affinity"); text != "" {
		return ParseList(text)
	}
	if mask := t.statusList("Cpus_allowed_list"); !mask.IsEmpty() {
		return mask, nil
	}
	if mask, _ := t.controlGroups().cpuset("cpus"); !mask.IsEmpty() {
		return mask, nil
	}
	return t.online(), nil
}

// Record writes the files that discovery reads as a txtar archive, for a bug report. It leaves out everything else.
// It also removes the host name from cgroup names where a batch system put it there.
func Record(root fs.FS, affinity cpuset.CPUSet) ([]byte, error) {
	r := recorder{root, map[string][]byte{}}
	h, err := Discover(r, affinity)
	if err != nil {
		return nil, err
	}
	r.dropOtherDevices(h)
	names := slices.Sorted(maps.Keys(r.files))
	archive := &txtar.Archive{
		Comment: []byte("A machine as plimsoll sees it; see plimsoll topology --fsroot.\n"),
		Files:   []txtar.File{{Name: "affinity", Data: []byte(affinity.String() + "\n")}},
	}
	rename := r.withoutHostname()
	for i, name := range names {
		if i+1 < len(names) && strings.HasPrefix(names[i+1], name+"/") {
			continue // a directory
		}
		archive.Files = append(archive.Files, txtar.File{Name: rename(name),
			Data: []byte(rename(string(r.files[name])))})
	}
	return txtar.Format(archive), nil
}

// recorder keeps what is read.
type recorder struct {
	root  fs.FS
	files map[string][]byte
}

// Open serves /proc/cpuinfo, of which discovery reads only the start.
func (r recorder) Open(name string) (fs.File, error) {
	if text := (tree{r.root}).head(name); text != "" {
		r.keep(name, text)
	}
	return r.root.Open(name)
}

func (r recorder) ReadFile(name string) ([]byte, error) {
	data, err := fs.ReadFile(r.root, name)
	if err == nil {
		r.keep(name, string(data))
	}
	return data, err
}

// listed are the directories of which discovery needs only the names.
var listed = []string{"net", "infiniband", "initiators", path.Base(nvidiaDirectory)}

// ReadDir records the entries as empty files; a later read of an entry records its content.
func (r recorder) ReadDir(directory string) ([]fs.DirEntry, error) {
	entries, err := fs.ReadDir(r.root, directory)
	if slices.Contains(listed, path.Base(directory)) {
		for _, entry := range entries {
			if name := path.Join(directory, entry.Name()); r.files[name] == nil {
				r.files[name] = []byte{}
			}
		}
	}
	return entries, err
}

// neededLines are the keys that discovery reads, by file, where a file holds more.
var neededLines = map[string][]string{
	"cpuinfo": {"model name", "cpu model", "cpu", "cpu implementer", "cpu part"},
	"status":  {"cpus_allowed_list", "mems_allowed_list", "vmsize"},
	"meminfo": {"memtotal", "memavailable", "memfree", "inactive(file)", "sreclaimable", "commitlimit",
		"committed_as"},
	"memory.stat": {"total_inactive_file", "inactive_file"},
	"numa_status": {"node"},
	"information": {"device minor"}, // without the UUID
}

var ofNodeMeminfo = regexp.MustCompile(`^Node \d+ `)

func (r recorder) keep(name, text string) {
	text = strings.Trim(text, "\x00")
	needed, some := neededLines[path.Base(name)]
	mounts := name == "proc/self/mountinfo" || name == "proc/mounts"
	if !some && !mounts {
		r.files[name] = []byte(text)
		return
	}
	var kept strings.Builder
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		key, _, colon := strings.Cut(ofNodeMeminfo.ReplaceAllString(line, ""), ":")
		if !colon {
			key, _, _ = strings.Cut(key, " ")
		}
		key = strings.ToLower(strings.TrimSpace(key))
		wanted := slices.Contains(needed, key) && !seen[key]
		seen[key] = true
		if wanted || mounts && controlGroupMount.MatchString(line) {
			kept.WriteString(line)
		}
	}
	r.files[name] = []byte(kept.String())
}

// controlGroupMount matches the cgroup lines of both mount tables.
var controlGroupMount = regexp.MustCompile(` (- )?(cgroup2?|cpuset) `)

// dropOtherDevices drops the PCI functions that discovery does not use.
func (r recorder) dropOtherDevices(h *Host) {
	const directory = "sys/bus/pci/devices/"
	useful := map[string]bool{}
	for _, device := range slices.Concat(h.GPUs, h.NICs) {
		useful[device.Address] = true
	}
	maps.DeleteFunc(r.files, func(name string, _ []byte) bool {
		rest, ok := strings.CutPrefix(name, directory)
		address, _, _ := strings.Cut(rest, "/")
		return ok && !useful[address]
	})
}

// withoutHostname removes the host name from cgroup names. The node daemon of Slurm, for example, puts its jobs below
// "slurm_NAME".
func (r recorder) withoutHostname() func(string) string {
	hostname := tree{r.root}.text("proc/sys/kernel/hostname")
	if hostname == "" {
		return func(text string) string { return text }
	}
	replacements := []string{}
	word := regexp.MustCompile(`(^|[^A-Za-z0-9])` + regexp.QuoteMeta(hostname) + `($|[^A-Za-z0-9])`)
	for _, member := range parseMemberships(string(r.files["proc/self/cgroup"])) {
		for element := range strings.SplitSeq(member.path, "/") {
			if word.MatchString(element) {
				replacements = append(replacements, "/"+element, "/"+word.ReplaceAllString(element, "${1}HOST${2}"))
			}
		}
	}
	return strings.NewReplacer(replacements...).Replace
}
