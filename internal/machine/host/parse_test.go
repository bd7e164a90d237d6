package host

import (
	"math/big"
	"strings"
	"testing"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
)

func TestParseList(t *testing.T) {
	for text, want := range map[string]string{
		"":               "",
		"\n":             "",
		"0":              "0",
		"0,4-11,21-26\n": "0,4-11,21-26",
		"3,1,1-2":        "1-3",
		"8191":           "8191",
		"1-3,2-5,1,7-7":  "1-5,7",
	} {
		if got, err := ParseList(text); err != nil || got.String() != want {
			t.Errorf("%q: got %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"a", "1-", "-1", "2-1", "0,,1", "0-4294967295", "8192", "0-7:2/4", "1 2", "0x1",
		"+1"} {
		if got, err := ParseList(text); err == nil {
			t.Errorf("%q: got %q, want an error", text, got)
		}
	}
}

func TestParseMask(t *testing.T) {
	for text, want := range map[string]string{
		"3":                          "0-1",
		"00007fff,c7e00ff1":          "0,4-11,21-26,30-46",
		"ffff,ffffffff":              "0-47",
		"1,00000000,00000000":        "64",
		"0000000000000000f0000000":   "28-31",
		"10000000000000000000000000": "100",
		"00000000":                   "",
	} {
		if got, err := ParseMask(text); err != nil || got.String() != want {
			t.Errorf("%q: got %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"g", "-1", "1,123456789", "1" + strings.Repeat("0", 20000)} {
		if got, err := ParseMask(text); err == nil {
			t.Errorf("%.20q: got %q, want an error", text, got)
		}
	}
}

func TestParseQuota(t *testing.T) {
	for text, want := range map[string]float64{
		"max 100000":           0,
		"650000 100000":        6.5,
		"75000 100000":         0.75,
		"50000":                0.5,
		"-1 100000":            0,
		"1 0":                  0,
		"":                     0,
		"9223372036854775807 ": 92233720368547.75807,
		"99999999999999999999": 0,
	} {
		if got := parseQuota(text); got != want {
			t.Errorf("%q: got %v, want %v", text, got, want)
		}
	}
}

func TestParseLimit(t *testing.T) {
	for text, want := range map[string]ledger.Bytes{"137438953472": 128 * ledger.GiB, "0": 0} {
		if got, ok := ParseLimit(text); !ok || got != want {
			t.Errorf("%q: got %v, %v", text, got, ok)
		}
	}
	for _, text := range []string{"max", "", "9223372036854771712", "9223372036854775807", "-1",
		"18446744073709551615"} {
		if got, ok := ParseLimit(text); ok {
			t.Errorf("%q: got %v, want none", text, got)
		}
	}
}

func TestParseFields(t *testing.T) {
	fields := ParseFields("MemTotal:  2 kB\nNode 7 MemFree: 3 kB\nHugePages_Total: 5\ninactive_file 9\nNode:\t\t1\n" +
		"x\n\ny: z kB\nhuge: 9223372036854775807 kB\nless: -1\n")
	want := map[string]int64{"MemTotal": 2048, "MemFree": 3072, "HugePages_Total": 5, "inactive_file": 9, "Node": 1}
	if len(fields) != len(want) {
		t.Errorf("got %v", fields)
	}
	for key, value := range want {
		if fields[key] != value {
			t.Errorf("%s: got %d, want %d", key, fields[key], value)
		}
	}
}

func TestUnescape(t *testing.T) {
	for text, want := range map[string]string{
		`/plain`: "/plain", `/a\040b\134`: `/a b\`, `/end\04`: `/end\04`, `/not\999`: `/not\999`, `\`: `\`,
	} {
		if got := unescape(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// TestParseListOfManyRanges: a list that names all ids again and again would take a thousand times its length in
// memory.
func TestParseListOfManyRanges(t *testing.T) {
	text := strings.Repeat("0-8191,", 1<<20) + "0"
	if _, err := ParseList(text); err == nil || !strings.Contains(err.Error(), "names ids more than once") {
		t.Error(err)
	}
}

func FuzzParseList(f *testing.F) {
	for _, seed := range []string{"0,4-11,21-26", "0-4294967295", "3,1,1-2", ",-"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		set, err := ParseList(text)
		if err != nil {
			return
		}
		if again, err := ParseList(set.String()); err != nil || !again.Equals(set) {
			t.Errorf("%q: %q reads as %q, %v", text, set, again, err)
		}
	})
}

// FuzzParseMask compares with arithmetic on large numbers.
func FuzzParseMask(f *testing.F) {
	for _, seed := range []string{"00007fff,c7e00ff1", "1,123456789", "f", ",", "1,00000000"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		set, err := ParseMask(text)
		if err != nil {
			return
		}
		digits := ""
		for i, word := range strings.Split(strings.TrimSpace(text), ",") {
			if i > 0 {
				word = strings.Repeat("0", 8-len(word)) + word
			}
			digits += word
		}
		number, ok := new(big.Int).SetString("0"+digits, 16)
		if !ok {
			t.Fatalf("%q is not hexadecimal", text)
		}
		ids := []int{}
		for bit := range number.BitLen() {
			if number.Bit(bit) == 1 {
				ids = append(ids, bit)
			}
		}
		if want := cpuset.New(ids...); !set.Equals(want) {
			t.Errorf("%q: got %q, want %q", text, set, want)
		}
	})
}

func FuzzParseFields(f *testing.F) {
	f.Add("MemTotal: 2 kB\nNode 7 MemFree: 3 kB\n")
	f.Fuzz(func(t *testing.T, text string) {
		for key, value := range ParseFields(text) {
			if value < 0 {
				t.Errorf("%s is %d", key, value)
			}
		}
	})
}

func FuzzParseQuota(f *testing.F) {
	f.Add("650000 100000")
	f.Add("max")
	f.Fuzz(func(t *testing.T, text string) {
		if quota := parseQuota(text); !(quota >= 0 && quota < 1e19) {
			t.Errorf("%q: %v", text, quota)
		}
	})
}

// FuzzMounts checks that every resulting path can be looked up.
func FuzzMounts(f *testing.F) {
	f.Add("0::/a/../b\n4:memory,cpu:/x:y", `30 23 0:26 / /sys/fs/c\040g rw shared:9 - cgroup2 c rw`,
		"cgroup /c cgroup rw,cpu 0 0")
	f.Fuzz(func(t *testing.T, members, info, table string) {
		for _, mounts := range [][]mount{parseMountInfo(info), parseMounts(table)} {
			groups := controlGroups{members: parseMemberships(members), mounts: mounts}
			for _, l := range groups.levels("cpu") {
				if strings.HasPrefix(l.directory, "/") || strings.Contains("/"+l.directory+"/", "/../") &&
					!strings.Contains(members+info+table, "..") {
					t.Errorf("directory %q", l.directory)
				}
			}
		}
	})
}
