package host

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
)

// maxID bounds CPU and node ids, as Linux is built for at most 8,192 CPUs. Without a bound a damaged file
// ("0-4294967295") would fill the memory.
const maxID = 1<<13 - 1

// ParseList reads a list of ids in the kernel's form: "0,4-11,21-26". An empty text is an empty set.
func ParseList(text string) (cpuset.CPUSet, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return cpuset.New(), nil
	}
	ids := []int{}
	for part := range strings.SplitSeq(text, ",") {
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		first, err := strconv.ParseUint(low, 10, 32)
		last, err2 := strconv.ParseUint(high, 10, 32)
		if err != nil || err2 != nil || first > last || last > maxID {
			return cpuset.New(), fault.Inputf("%q in the list %q is not a CPU id or a range of ids up to %d", part,
				shorten(text), maxID).WithHint(`write ids and ranges with commas between them, as in "0,4-11,21-26"`)
		}
		for id := first; id <= last; id++ {
			ids = append(ids, int(id))
		}
		if len(ids) > maxID+1 { // a short text could otherwise name all ids again and again
			return cpuset.New(), fault.Inputf("the list %q names ids more than once", shorten(text)).
				WithHint("name each id once")
		}
	}
	return cpuset.New(ids...), nil
}

// ParseMask reads a set as the kernel writes masks: comma-separated hexadecimal words of 32 bits, the highest first.
func ParseMask(text string) (cpuset.CPUSet, error) {
	words := strings.Split(strings.TrimSpace(text), ",")
	ids := []int{}
	for i, word := range words {
		offset := 32 * (len(words) - 1 - i)
		if len(words) > 1 && len(word) > 8 {
			return cpuset.New(), fmt.Errorf("mask word %q has more than 32 bits", shorten(word))
		}
		for j := range len(word) {
			digit, err := strconv.ParseUint(word[j:j+1], 16, 4)
			if err != nil {
				return cpuset.New(), fmt.Errorf("mask word %q is not hexadecimal", shorten(word))
			}
			for bit := range 4 {
				if id := offset + 4*(len(word)-1-j) + bit; digit>>bit&1 == 1 {
					if id > maxID {
						return cpuset.New(), fmt.Errorf("mask has bit %d; ids end at %d", id, maxID)
					}
					ids = append(ids, id)
				}
			}
		}
	}
	return cpuset.New(ids...), nil
}

// ParseFields reads lines "Key: 123 kB" and "Key 123": /proc/meminfo, a node's meminfo ("Node 0 MemTotal: ..."), a
// cgroup's memory.stat. It skips lines of another form.
func ParseFields(text string) map[string]int64 {
	fields := map[string]int64{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) > 2 && words[0] == "Node" {
			words = words[2:]
		}
		if len(words) < 2 {
			continue
		}
		value, err := strconv.ParseInt(words[1], 10, 64)
		if len(words) > 2 && words[2] == "kB" {
			if value > math.MaxInt64>>10 {
				continue
			}
			value <<= 10
		}
		if err == nil && value >= 0 {
			fields[strings.TrimSuffix(words[0], ":")] = value
		}
	}
	return fields
}

// parseQuota reads a cgroup's CPU quota in the form of cpu.max: microseconds ("max" or a negative number for none)
// per period. It returns 0 for none.
func parseQuota(text string) float64 {
	words := append(strings.Fields(text), "100000") // the kernel's default period
	if len(words) < 2 {
		return 0
	}
	quota, err := strconv.ParseInt(words[0], 10, 64)
	period, err2 := strconv.ParseInt(words[1], 10, 64)
	if err != nil || err2 != nil || quota <= 0 || period <= 0 {
		return 0
	}
	return float64(quota) / float64(period)
}

// ParseLimit reads a cgroup's limit in bytes. For no limit version 2 writes "max" and version 1 the largest multiple
// of a page.
func ParseLimit(text string) (ledger.Bytes, bool) {
	n, err := strconv.ParseInt(text, 10, 64)
	return ledger.Bytes(n), err == nil && n >= 0 && n < math.MaxInt64>>1
}

// parseSize reads the size of a cache: "32768K", "36M".
func parseSize(text string) ledger.Bytes {
	unit := ledger.Bytes(1)
	switch {
	case strings.HasSuffix(text, "K"):
		unit = ledger.KiB
	case strings.HasSuffix(text, "M"):
		unit = ledger.MiB
	}
	n, err := strconv.ParseUint(strings.TrimRight(text, "KM"), 10, 32)
	if err != nil {
		return 0
	}
	return ledger.Bytes(n) * unit
}

// membership is a line of /proc/self/cgroup. Version 2 has no controllers.
type membership struct {
	controllers []string
	path        string
}

func parseMemberships(text string) []membership {
	groups := []membership{}
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimRight(line, "\n"), ":", 3)
		if len(fields) == 3 {
			groups = append(groups, membership{strings.FieldsFunc(fields[1], isComma), fields[2]})
		}
	}
	return groups
}

// mount is a mounted file system.
type mount struct {
	root    string // the directory of the file system that is mounted
	point   string
	kind    string
	options []string // of the file system; a cgroup lists its controllers here
}

// parseMountInfo reads /proc/self/mountinfo.
func parseMountInfo(text string) []mount {
	mounts := []mount{}
	for line := range strings.Lines(text) {
		before, after, _ := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) >= 5 && len(right) >= 3 {
			mounts = append(mounts, mount{
				root: unescape(left[3]), point: unescape(left[4]),
				kind: right[0], options: strings.FieldsFunc(right[2], isComma),
			})
		}
	}
	return mounts
}

// parseMounts reads /proc/mounts. That file does not say which part of a file system is mounted; parseMounts assumes
// all of it.
func parseMounts(text string) []mount {
	mounts := []mount{}
	for line := range strings.Lines(text) {
		if words := strings.Fields(line); len(words) >= 4 {
			mounts = append(mounts, mount{
				root: "/", point: unescape(words[1]),
				kind: words[2], options: strings.FieldsFunc(words[3], isComma),
			})
		}
	}
	return mounts
}

// unescape undoes the octal escapes of the mount tables ("\040" is a space).
func unescape(text string) string {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] == '\\' && i+4 <= len(text) {
			if code, err := strconv.ParseUint(text[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(code))
				i += 3
				continue
			}
		}
		b.WriteByte(text[i])
	}
	return b.String()
}

// selected returns the word in brackets: "always [madvise] never".
func selected(text string) string {
	_, after, _ := strings.Cut(text, "[")
	word, _, ok := strings.Cut(after, "]")
	if !ok {
		return ""
	}
	return word
}

func isComma(r rune) bool { return r == ',' }

func shorten(text string) string {
	if len(text) > 60 {
		return text[:57] + "..."
	}
	return text
}
