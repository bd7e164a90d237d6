//go:build linux

package service

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"
)

// answering returns the address at which a service answers Prometheus.
func answering(t *testing.T) string {
	t.Helper()
	server, _ := serveHere(t)
	listener, err := ListenForMetrics(":0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String() // closed below, and free then
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	stop, err := server.ServeMetrics(address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return address
}

// TestMetricsOfThisHostAlone checks that an address without a host does not mean all
// networks.
func TestMetricsOfThisHostAlone(t *testing.T) {
	host, _, err := net.SplitHostPort(answering(t))
	if err != nil || !net.ParseIP(host).IsLoopback() {
		t.Errorf("it listens at %s, %v: expected the loopback interface", host, err)
	}
}

// TestMetricsForKnownHosts refuses requests that foreign pages can make a browser send.
func TestMetricsForKnownHosts(t *testing.T) {
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	handler := knownHosts("metrics.example.org:9464", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "here")
	}))
	for host, want := range map[string]int{
		"127.0.0.1:9464": 200, "[::1]:9464": 200, "10.1.2.3": 200, "localhost": 200, "LOCALHOST:9464": 200, "": 200,
		own: 200, own + ".cluster.local:9464": 200, "metrics.example.org:9464": 200,
		"evil.example": 403, "evil.example:9464": 403, "127.0.0.1.evil.example": 403, "localhost.evil.example": 403,
	} {
		request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		request.Host = host
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		if answer.Code != want {
			t.Errorf("host %q: %d %s, want %d", host, answer.Code, answer.Body, want)
		}
	}
}

// TestMetricsLeaveFilesForSessions opens many silent connections to the metrics. Only a
// few of them take a file of the service at a time, and none for long.
func TestMetricsLeaveFilesForSessions(t *testing.T) {
	address := answering(t)
	files := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	const many = 10 * mostScrapes
	before := files()
	for range many {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	time.Sleep(300 * time.Millisecond) // until the service has accepted as many as it will
	if taken := files() - before - many; taken > mostScrapes+2 {
		t.Errorf("the service has taken %d connections, want %d at most", taken, mostScrapes)
	}
}

// TestMetricsKeepNoConnection checks that the service closes a connection after its
// answer.
func TestMetricsKeepNoConnection(t *testing.T) {
	c, err := net.Dial("tcp", answering(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(c) // until the connection ends
	if err != nil || !strings.Contains(string(answer), "plimsoll_clients") {
		t.Errorf("%v\n%.500s", err, answer)
	}
}

// TestNothingButMetrics checks that no other path is served.
func TestNothingButMetrics(t *testing.T) {
	address := answering(t)
	for path, want := range map[string]int{"/metrics": 200, "/": 404, "/metrics/": 404, "/debug/pprof/": 404,
		"/x/../metrics": 404} {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "GET "+path+" HTTP/1.0\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		answer, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || answer.StatusCode != want {
			t.Errorf("%s: %v, %v: want %d", path, answer, err, want)
		}
	}
}
