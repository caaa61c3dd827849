package proxy

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// upgrade runs a server that accepts every upgrade, with more header fields if
// given, and then does as told: for bytes that no WebSocket library sends.
func upgrade(t *testing.T, fields string, do func(c *client)) string {
	return script(t, func(_ int, c net.Conn, r *bufio.Reader) {
		if _, err := readHeadRaw(r); err != nil {
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n%s\r\n", fields)
		do(&client{t, c, r})
	})
}

// ask is a request to upgrade.
func askUpgrade(path string) string {
	return "GET " + path + " HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
}

// upgraded is a connection through weir whose upgrade was accepted.
func (r *rig) upgraded(path string) *client {
	r.Helper()
	c := r.dial()
	c.send("%s", askUpgrade(path))
	c.head()
	return c
}

// frame is one frame as it goes over the wire; the client's are masked.
func frame(client bool, first byte, payload []byte) []byte {
	b := []byte{first}
	mask := byte(0)
	if client {
		mask = 0x80
	}
	switch n := len(payload); {
	case n < 126:
		b = append(b, mask|byte(n))
	case n < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, mask|126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, mask|127), uint64(n))
	}
	if !client {
		return append(b, payload...)
	}
	var key [4]byte
	binary.LittleEndian.PutUint32(key[:], rand.Uint32())
	b = append(b, key[:]...)
	for i, c := range payload {
		b = append(b, c^key[i&3])
	}
	return b
}
